"""The GRU in torch operations: one matrix product for all inputs, then one or two products and a few pointwise operations per step.

Runs wherever torch runs; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernels.framework import StepOutputs, linear, order_by_length
from kernels.gated import RESET_BEFORE, HiddenState, clipped, gate_inputs, recurrent_product
from kernels.gru.types import GRUWeights
from kernels.ragged import Encoded, Outputs, Ragged


def gru(x: Ragged, weights: GRUWeights, state: HiddenState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.gru.types`."""
    order = order_by_length(x)
    data = order.sort_tokens(x.data)
    gates = gate_inputs(data, weights)
    hidden = order.sort_rows(state.hidden if state else None, weights.hidden)
    outputs = StepOutputs(order, weights.hidden, want)
    advance = _advance(weights)
    for (step,), (running,) in zip(order.by_step(gates), order.by_row(hidden), strict=True):
        advance(step, running, weights)
        outputs.add(running)
    return outputs.encoded(hidden, HiddenState(order.unsort_rows(hidden)))


def _advance(weights: GRUWeights) -> Callable[[Tensor, Tensor, GRUWeights], None]:
    """Return the function that advances the running rows by one step, in place."""
    if set(weights.variants) - {RESET_BEFORE}:
        return _variant_step
    return _reset_before if weights.recurrent_bias is None else _reset_after


def _variant_step(gates: Tensor, hidden: Tensor, weights: GRUWeights) -> None:
    """Advance the running rows of any GRU."""
    size = weights.hidden
    gate, activation = weights.activations
    if weights.recurrent_bias is None:
        r, z = gate(clipped(linear(hidden, weights.recurrent[:, : 2 * size], gates[:, : 2 * size]), weights.clip)).chunk(
            2, dim=1
        )
        n = linear(r * hidden, weights.recurrent[:, 2 * size :], gates[:, 2 * size :])
    else:
        product = recurrent_product(hidden, weights)
        r, z = gate(clipped(gates[:, : 2 * size] + product[:, : 2 * size], weights.clip)).chunk(2, dim=1)
        n = gates[:, 2 * size :] + r * (product[:, 2 * size :] + weights.recurrent_bias)
    n = activation(clipped(n, weights.clip))
    hidden.sub_(n).mul_(z).add_(n)


def _reset_after(gates: Tensor, hidden: Tensor, weights: GRUWeights) -> None:
    """The reset gate scales the recurrent product of the new gate."""
    assert weights.recurrent_bias is not None
    size = weights.hidden
    recurrent = linear(hidden, weights.recurrent, None)
    r, z = (gates[:, : 2 * size] + recurrent[:, : 2 * size]).sigmoid_().chunk(2, dim=1)
    n = recurrent[:, 2 * size :].add_(weights.recurrent_bias).mul_(r).add_(gates[:, 2 * size :]).tanh_()
    hidden.sub_(n).mul_(z).add_(n)


def _reset_before(gates: Tensor, hidden: Tensor, weights: GRUWeights) -> None:
    """The reset gate scales the hidden state before the product of the new gate."""
    size = weights.hidden
    r, z = linear(hidden, weights.recurrent[:, : 2 * size], gates[:, : 2 * size]).sigmoid_().chunk(2, dim=1)
    n = linear(r * hidden, weights.recurrent[:, 2 * size :], gates[:, 2 * size :]).tanh_()
    hidden.sub_(n).mul_(z).add_(n)
