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
from torch.nn.functional import conv1d, gelu, glu, pad

from kernels.contract import ContractError, ConvState, ConvWeights, Encoded, Ragged
from kernels.embedding import fold_taps
from tests.kernels.families import Form, runs_on_a_cpu
from tests.kernels.inputs import assert_close, assert_encodes_alike, encoding, rows, steps_by_row, widened

LENGTHS = [9, 0, 1, 3, 14, 2]
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.clone,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": gelu,
    "glu": glu,
    "gated_tanh": lambda maps: maps[:, :5].tanh() * maps[:, 5:].sigmoid(),
}
BACKENDS = [backend.name for backend in Form("conv").backends if runs_on_a_cpu(backend)]

some_options = st.fixed_dictionaries(
    {
        "width": st.integers(1, 5),
        "left": st.integers(0, 9),
        "right": st.integers(0, 9),
        "dilation": st.integers(1, 3),
        "stride": st.integers(1, 4),
        "activation": st.sampled_from(sorted(TORCH)),
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
            steps.append(row.new_zeros(0, len(weights.bias)))
            continue
        filters = weights.filters.permute(2, 1, 0)
        steps.append(conv1d(padded.T[None], filters, weights.bias, weights.stride, dilation=weights.dilation)[0].T)
    left = torch.stack([row[len(row) - weights.left :] for row in continued])
    return encoding([TORCH[weights.activation](row) for row in steps], ConvState(left))


@pytest.mark.parametrize("backend", BACKENDS)
@hypothesis.given(lengths=st.lists(st.integers(0, 9), max_size=5), options=some_options, seed=st.integers(0, 2**31))
@hypothesis.settings(max_examples=30, deadline=None)
def test_an_embedding_before_the_filters_and_one_folded_into_them_give_what_its_vectors_do(
    backend: str, lengths: list[int], options: dict[str, Any], seed: int
) -> None:
    form = Form("conv", ids="embedding", **options)
    x, weights, _ = form.given(lengths, 5, 3, seed=seed)
    embedding = weights.embedding
    plain, folded = replace(weights, embedding=None), fold_taps(embedding, weights.filters)
    expected = form.run(Ragged(embedding[x.data.long()], x.offsets), plain, backend=backend)
    for one in (weights, replace(plain, tables=folded)):
        given = form.run(x, one, backend=backend)
        assert given.state is None
        assert_encodes_alike(replace(given, state=expected.state), expected, steps=max(lengths, default=0))


@pytest.mark.parametrize("ids", ["embedding", "tables"])
def test_a_convolution_over_ids_keeps_no_state_and_takes_none(ids: str) -> None:
    x, weights, _ = Form("conv", left=2, ids=ids).given([3, 1], 5, 3)
    with pytest.raises(ContractError, match="state is given although the data are ids: a convolution over ids keeps none"):
        Form("conv").run(x, weights, ConvState(torch.zeros(2, 2, 3)))


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
