"""The GRU with the framework's own operations: one library product for all inputs, then one or two products and a few pointwise
operations per step. Runs wherever torch runs; nothing is padded."""

from __future__ import annotations

from torch import Tensor

from kernels.contract import Encoded, GRUState, GRUWeights, Outputs, Ragged
from kernels.walk import Harvest, longest_first, product


def gru(x: Ragged, weights: GRUWeights, state: GRUState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    order = longest_first(x)
    data = x.data.index_select(0, order.tokens)
    gates = data.float() if weights.input is None else product(data, weights.input, weights.bias)
    hidden = order.sorted(state.hidden if state else None, weights.hidden)
    harvest = Harvest(order, weights.hidden, want)
    advance = _reset_before if weights.recurrent_bias is None else _reset_after
    for (step,), (running,) in zip(order.by_step(gates), order.by_row(hidden), strict=True):
        advance(step, running, weights)
        harvest.take(running)
    return harvest.encoded(hidden, GRUState(order.rows_back(hidden)))


def _reset_after(gates: Tensor, hidden: Tensor, weights: GRUWeights) -> None:
    """One step of the running rows, in place, the reset applied to the recurrent product of the new gate."""
    assert weights.recurrent_bias is not None
    size = weights.hidden
    recurrent = product(hidden, weights.recurrent, None)
    r, z = (gates[:, : 2 * size] + recurrent[:, : 2 * size]).sigmoid_().chunk(2, dim=1)
    n = recurrent[:, 2 * size :].add_(weights.recurrent_bias).mul_(r).add_(gates[:, 2 * size :]).tanh_()
    hidden.sub_(n).mul_(z).add_(n)


def _reset_before(gates: Tensor, hidden: Tensor, weights: GRUWeights) -> None:
    """One step of the running rows, in place, the reset applied to the hidden state before the product of the new gate."""
    size = weights.hidden
    r, z = product(hidden, weights.recurrent[:, : 2 * size], gates[:, : 2 * size]).sigmoid_().chunk(2, dim=1)
    n = product(r * hidden, weights.recurrent[:, 2 * size :], gates[:, 2 * size :]).tanh_()
    hidden.sub_(n).mul_(z).add_(n)
