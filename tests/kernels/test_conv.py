"""The convolution's reference against torch row by row, and the loops of the CPU against the reference."""

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
from kernels.ragged import Encoded, Ragged
from tests.kernels.families import Form, cpu_backends
from tests.kernels.inputs import as_float64, assert_encodings_close, encoding, rows, steps_by_row

TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.clone,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": gelu,
    "glu": glu,
    "gated_tanh": lambda maps: maps[:, :5].tanh() * maps[:, 5:].sigmoid(),
}
some_lengths, some_seeds = st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 2**31)
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


@pytest.mark.slow
@hypothesis.given(lengths=some_lengths, options=some_options, seed=some_seeds)
@hypothesis.settings(max_examples=60)
def test_any_filter_agrees_with_torch_conv1d(lengths: list[int], options: dict[str, Any], seed: int) -> None:
    """The reference in float64, and the backend of users against the reference."""
    form = Form("conv", **options)
    arguments = form.arguments(lengths, 5, 3, seed=seed)
    x, weights, state = exact = as_float64(arguments)
    padded = [pad(row, (0, 0, weights.left, 0)) for row in rows(x)]
    encoded = form.run(x, weights, backend="reference")
    assert_encodings_close(encoded, torch_conv(padded, weights), steps=0, dtype=torch.float64)
    continued = [torch.cat((left, row)) for left, row in zip(state.left, rows(x), strict=True)]
    encoded = form.run(*exact, backend="reference")
    assert_encodings_close(encoded, torch_conv(continued, weights), steps=0, dtype=torch.float64)
    assert [len(row) for row in steps_by_row(encoded, x)] == weights.steps(np.array(lengths)).tolist()
    assert_encodings_close(form.run(*arguments), encoded, steps=max(lengths))


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


@pytest.mark.parametrize("backend", cpu_backends("conv"))
@hypothesis.given(lengths=some_lengths, options=some_options, seed=some_seeds)
@hypothesis.settings(max_examples=15)
def test_embedding_and_tables_agree_with_vectors(backend: str, lengths: list[int], options: dict[str, Any], seed: int) -> None:
    form = Form("conv", ids="embedding", **options)
    x, weights, _ = form.arguments(lengths, 5, 3, seed=seed)
    plain, folded = replace(weights, embedding=None), fold_taps(weights.embedding, weights.filters)
    expected = form.run(Ragged(weights.embedding[x.data.long()], x.offsets), plain, backend=backend)
    for one in (weights, replace(plain, tables=folded)):
        encoded = form.run(x, one, backend=backend)
        assert encoded.state is None
        assert_encodings_close(replace(encoded, state=expected.state), expected, steps=max(lengths))
