"""Made-up arguments for the kernels, the same arguments widened for the reference, and the tolerance between the two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.contract import Encoded, LSTMState, LSTMWeights, Outputs, Ragged

EVERYTHING = Outputs(steps=True, last=True, mean=True, max=True)
OUTPUTS = ("steps", "last", "mean", "max")


class Given(NamedTuple):
    """The arguments of one call, in the order in which every backend takes them."""

    x: Ragged
    weights: LSTMWeights
    state: LSTMState


def ragged(data: Tensor, lengths: Sequence[int], offsets: torch.dtype = torch.int32) -> Ragged:
    return Ragged(data, torch.tensor([0, *accumulate(lengths)], dtype=offsets))


def lstm(lengths: Sequence[int], hidden: int, inputs: int, *, storage: torch.dtype = torch.float32, seed: int = 0) -> Given:
    """Normal values, weights scaled so that gates neither vanish nor saturate; the weights in `storage`, the rest float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = LSTMWeights(
        input=(normal(inputs, 4 * hidden) * inputs**-0.5).to(storage),
        recurrent=(normal(hidden, 4 * hidden) * hidden**-0.5).to(storage),
        bias=normal(4 * hidden).to(storage),
    )
    state = LSTMState(normal(len(lengths), hidden).tanh(), normal(len(lengths), hidden))
    return Given(ragged(normal(sum(lengths), inputs), lengths), weights, state)


def widened(given: Given) -> Given:
    """The same values in float64."""
    x, weights, state = given
    return Given(
        Ragged(x.data.double(), x.offsets),
        LSTMWeights(_wide(weights.input), weights.recurrent.double(), _wide(weights.bias)),
        LSTMState(state.hidden.double(), state.cell.double()),
    )


def gated(given: Given) -> Given:
    """The same problem with its gate inputs computed beforehand."""
    x, weights, state = given
    assert weights.input is not None and weights.bias is not None
    gates = torch.addmm(weights.bias, x.data, weights.input)
    return Given(Ragged(gates, x.offsets), LSTMWeights(None, weights.recurrent, None), state)


def rows(x: Ragged) -> list[Tensor]:
    """Each row's tokens."""
    return list(torch.split(x.data, x.lengths()))


def rounding(dtype: torch.dtype, steps: int) -> float:
    """What `steps` steps in `dtype` may be off: a few roundings for the products, one more for each step."""
    return float(torch.finfo(dtype).eps) * (32 + steps)


def assert_close(actual: Tensor, expected: Tensor, *, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Equal within the rounding of `dtype` over `steps` steps, relative to the larger of 1 and the expected value."""
    tolerance = rounding(dtype, steps)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def assert_encodes_alike(actual: Encoded, expected: Encoded, *, steps: int) -> None:
    """Every output that was expected, and the state."""
    for name in OUTPUTS:
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert_close(one, other, steps=steps)
    assert_close(actual.state.hidden, expected.state.hidden, steps=steps)
    assert_close(actual.state.cell, expected.state.cell, steps=steps)


def _wide(array: Tensor | None) -> Tensor | None:
    return None if array is None else array.double()
