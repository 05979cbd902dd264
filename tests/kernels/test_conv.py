"""The convolution's reference compared with torch row by row, and every backend compared with the reference."""

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

from kernels.conv.types import ConvState, ConvWeights
from kernels.embedding import fold_taps
from kernels.ragged import ContractError, Encoded, Ragged
from tests.kernels.families import Form, runs_on_cpu
from tests.kernels.inputs import as_float64, assert_close, assert_encodings_close, encoding, rows, steps_by_row

LENGTHS = [9, 0, 1, 3, 14, 2]
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.clone,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": gelu,
    "glu": glu,
    "gated_tanh": lambda maps: maps[:, :5].tanh() * maps[:, 5:].sigmoid(),
}
BACKENDS = [backend.name for backend in Form("conv").backends if runs_on_cpu(backend)]

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
def test_reference_agrees_with_torch_conv1d(lengths: list[int], options: dict[str, Any], seed: int) -> None:
    form = Form("conv", **options)
    x, weights, _ = given = as_float64(form.arguments(lengths, 5, 3, seed=seed))
    padded = [pad(row, (0, 0, weights.left, 0)) for row in rows(x)]
    encoded = form.run(x, weights, backend="reference")
    assert_encodings_close(encoded, torch_conv(padded, weights), steps=0, dtype=torch.float64)
    continued = [torch.cat((left, row)) for left, row in zip(given.state.left, rows(x), strict=True)]
    encoded = form.run(*given, backend="reference")
    assert_encodings_close(encoded, torch_conv(continued, weights), steps=0, dtype=torch.float64)


@hypothesis.given(lengths=st.lists(st.integers(0, 9), max_size=5), options=some_options, seed=st.integers(0, 2**31))
def test_any_filter_agrees_with_the_reference(lengths: list[int], options: dict[str, Any], seed: int) -> None:
    form = Form("conv", **options)
    given = form.arguments(lengths, 5, 3, seed=seed)
    assert_encodings_close(form.run(*given), form.exact(given), steps=max(lengths, default=0))


def torch_conv(continued: list[Tensor], weights: ConvWeights) -> Encoded:
    """Return torch's result for rows that include their left context. torch's filters are (outputs, inputs, width)."""
    steps = []
    for row in continued:
        padded = pad(row, (0, 0, 0, weights.right))
        if len(padded) < weights.reach:  # torch rejects rows that are shorter than the filter
            steps.append(row.new_zeros(0, len(weights.bias)))
            continue
        filters = weights.filters.permute(2, 1, 0)
        steps.append(conv1d(padded.T[None], filters, weights.bias, weights.stride, dilation=weights.dilation)[0].T)
    left = torch.stack([row[len(row) - weights.left :] for row in continued])
    return encoding([TORCH[weights.activation](row) for row in steps], ConvState(left))


@pytest.mark.parametrize("backend", BACKENDS)
@hypothesis.given(lengths=st.lists(st.integers(0, 9), max_size=5), options=some_options, seed=st.integers(0, 2**31))
@hypothesis.settings(max_examples=30)
def test_embedding_and_tables_agree_with_vectors(backend: str, lengths: list[int], options: dict[str, Any], seed: int) -> None:
    form = Form("conv", ids="embedding", **options)
    x, weights, _ = form.arguments(lengths, 5, 3, seed=seed)
    embedding = weights.embedding
    plain, folded = replace(weights, embedding=None), fold_taps(embedding, weights.filters)
    expected = form.run(Ragged(embedding[x.data.long()], x.offsets), plain, backend=backend)
    for one in (weights, replace(plain, tables=folded)):
        given = form.run(x, one, backend=backend)
        assert given.state is None
        assert_encodings_close(replace(given, state=expected.state), expected, steps=max(lengths, default=0))


@pytest.mark.parametrize("ids", ["embedding", "tables"])
def test_convolution_over_ids_has_no_state(ids: str) -> None:
    x, weights, _ = Form("conv", left=2, ids=ids).arguments([3, 1], 5, 3)
    with pytest.raises(
        ContractError, match="state must be None because the data are ids: a convolution over ids keeps no state"
    ):
        Form("conv").run(x, weights, ConvState(torch.zeros(2, 2, 3)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [3, 4, 5])
def test_relu_and_maximum_over_time_commute(backend: str, width: int) -> None:
    x, before, _ = Form("conv", width=width, activation="relu").arguments(LENGTHS, 7, 5)
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
def test_number_of_output_steps_agrees_with_the_weights(backend: str, options: dict[str, int]) -> None:
    form = Form("conv", **options)
    x, weights, state = form.arguments(LENGTHS, 5, 3)
    written = steps_by_row(form.run(x, weights, state, backend=backend), x)
    assert [len(row) for row in written] == weights.steps(np.array(LENGTHS)).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_shorter_than_the_filter_pools_to_zero(backend: str) -> None:
    form = Form("conv", width=4)
    given = form.arguments([3, 5, 0], 5, 3)
    encoded = form.run(*given, backend=backend)
    assert [len(row) for row in steps_by_row(encoded, given.x)] == [0, 2, 0]
    for pooled in (encoded.last, encoded.mean, encoded.max):
        assert pooled is not None and pooled.any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_padding_creates_steps_in_an_empty_row(backend: str) -> None:
    form = Form("conv", width=3, left=2, right=3)
    x, weights, _ = form.arguments([0], 5, 3)
    encoded = form.run(x, weights, backend=backend)
    assert encoded.steps is not None
    assert_close(encoded.steps, weights.bias.expand(3, 5), steps=0)
