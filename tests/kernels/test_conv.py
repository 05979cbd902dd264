"""The reference of the convolution is torch's, row by row; rows of any length, padding and stride."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d, gelu, pad

from kernels.contract import ConvState, ConvWeights, Encoded, Ragged
from kernels.conv import conv_of_ids
from kernels.embedding import fold_taps
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, assert_close, assert_encodes_alike, encoding, rows, steps_by_row, widened

LENGTHS = [9, 0, 1, 3, 14, 2]
TORCH: dict[str, Callable[[Tensor], Tensor]] = {"none": torch.clone, "relu": torch.relu, "tanh": torch.tanh, "gelu": gelu}
BACKENDS = [backend.name for backend in Form("conv").backends]

some_options = st.fixed_dictionaries(
    {
        "width": st.integers(1, 5),
        "left": st.integers(0, 9),
        "right": st.integers(0, 9),
        "dilation": st.integers(1, 3),
        "stride": st.integers(1, 4),
        "activation": st.sampled_from(["none", "relu", "tanh", "gelu"]),
    }
)


@hypothesis.given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), options=some_options, seed=st.integers(0, 2**31))
@hypothesis.settings(deadline=None)
def test_the_reference_is_torch_conv1d_of_every_padded_row(lengths: list[int], options: dict[str, Any], seed: int) -> None:
    form = Form("conv", **options)
    x, weights, _ = given = widened(form.given(lengths, 5, 3, seed=seed))
    padded = [pad(row, (0, 0, weights.left, 0)) for row in rows(x)]
    encoded = form.run(x, weights, backend="reference")
    assert_encodes_alike(encoded, torch_conv(padded, weights), steps=0, dtype=torch.float64)
    continued = [torch.cat((left, row)) for left, row in zip(given.state.left, rows(x), strict=True)]
    encoded = form.run(*given, backend="reference")
    assert_encodes_alike(encoded, torch_conv(continued, weights), steps=0, dtype=torch.float64)


@hypothesis.given(lengths=st.lists(st.integers(0, 9), max_size=5), options=some_options, seed=st.integers(0, 2**31))
@hypothesis.settings(deadline=None)
def test_any_filter_agrees_with_the_reference(lengths: list[int], options: dict[str, Any], seed: int) -> None:
    form = Form("conv", **options)
    given = form.given(lengths, 5, 3, seed=seed)
    assert_encodes_alike(form.run(*given), form.exact(given), steps=max(lengths, default=0))


def torch_conv(continued: list[Tensor], weights: ConvWeights) -> Encoded:
    """What torch makes of rows that have their steps on the left already; its filters are (outputs, inputs, width)."""
    steps = []
    for row in continued:
        padded = pad(row, (0, 0, 0, weights.right))
        if len(padded) < weights.reach:  # torch refuses them
            steps.append(row.new_zeros(0, weights.outputs))
            continue
        filters = weights.filters.permute(2, 1, 0)
        steps.append(conv1d(padded.T[None], filters, weights.bias, weights.stride, dilation=weights.dilation)[0].T)
    left = torch.stack([row[len(row) - weights.left :] for row in continued])
    return encoding([TORCH[weights.activation](row) for row in steps], ConvState(left))


@hypothesis.given(lengths=st.lists(st.integers(0, 9), max_size=5), options=some_options, seed=st.integers(0, 2**31))
@hypothesis.settings(deadline=None)
def test_an_embedding_folded_into_the_filters_gives_what_both_give(
    lengths: list[int], options: dict[str, Any], seed: int
) -> None:
    form = Form("conv", **options)
    (features, weights, _), generator = form.given(lengths, 5, 3, seed=seed), torch.Generator().manual_seed(seed)
    embedding = torch.randn(13, 3, generator=generator)
    ids = Ragged(torch.randint(13, (len(features.data),), generator=generator, dtype=torch.int32), features.offsets)
    expected = form.run(Ragged(embedding[ids.data.long()], ids.offsets), weights)
    folded = conv_of_ids(ids, fold_taps(embedding, weights.filters), weights, want=EVERYTHING)
    assert folded.state is None
    assert_encodes_alike(replace(folded, state=expected.state), expected, steps=max(lengths, default=0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [3, 4, 5])
def test_a_text_cnn_may_take_its_relu_before_or_after_the_maximum_over_time(backend: str, width: int) -> None:
    x, before, _ = Form("conv", width=width, activation="relu").given(LENGTHS, 7, 5)
    after = ConvWeights(before.filters, before.bias)
    one, other = (Form("conv").run(x, weights, backend=backend).max for weights in (before, after))
    assert one is not None and other is not None
    assert torch.equal(one, other.relu())
    for row, data in zip(one, rows(x), strict=True):
        maps = conv1d(data.T[None], before.filters.permute(2, 1, 0), before.bias).relu() if len(data) >= width else None
        assert_close(row, torch.zeros(7) if maps is None else maps[0].amax(1), steps=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {"width": 4},
        {"width": 3, "left": 1, "right": 1},
        {"width": 3, "left": 4, "right": 5},
        {"width": 2, "left": 3, "dilation": 3, "stride": 2},
    ],
    ids=str,
)
def test_the_steps_that_come_out_are_as_many_as_the_weights_say(backend: str, options: dict[str, int]) -> None:
    form = Form("conv", **options)
    x, weights, state = form.given(LENGTHS, 5, 3)
    written = steps_by_row(form.run(x, weights, state, backend=backend), x)
    assert [len(row) for row in written] == weights.steps(np.array(LENGTHS)).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_shorter_than_the_filter_gives_no_step_and_pools_to_zero(backend: str) -> None:
    form = Form("conv", width=4)
    given = form.given([3, 5, 0], 5, 3)
    encoded = form.run(*given, backend=backend)
    assert [len(row) for row in steps_by_row(encoded, given.x)] == [0, 2, 0]
    for pooled in (encoded.last, encoded.mean, encoded.max):
        assert pooled is not None and pooled.any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wide_padding_gives_steps_even_to_a_row_without_any(backend: str) -> None:
    form = Form("conv", width=3, left=2, right=3)
    x, weights, _ = form.given([0], 5, 3)
    encoded = form.run(x, weights, backend=backend)
    assert encoded.steps is not None
    assert_close(encoded.steps, weights.bias.expand(3, 5), steps=0)
