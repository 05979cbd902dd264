"""Shared by the LSTM and the GRU: the check of their weights, and their layers over token ids."""

from __future__ import annotations

from typing import Any

from kernels.embedding import embed
from kernels.ragged import (
    ContractError,
    Encoded,
    Outputs,
    Ragged,
    RunKernel,
    check_absent,
    check_ids,
    check_ragged,
    check_shape,
)


def gated_columns(weights: Any, gates: int) -> int | None:
    """Return the data's number of columns for an LSTM (4 gates) or a GRU (3), or None for ids.

    Raises ContractError for inconsistent weights.
    """
    check_shape("weights.recurrent", weights.recurrent, (None, None))
    hidden: int = weights.hidden
    check_shape("weights.recurrent", weights.recurrent, (hidden, gates * hidden))
    if weights.table is not None:
        check_absent(weights, ("input", "bias"), "the data are ids")
        check_shape("weights.table", weights.table, (None, gates * hidden))
        return None
    if weights.input is not None and weights.bias is not None:
        check_shape("weights.input", weights.input, (None, gates * hidden))
        check_shape("weights.bias", weights.bias, (gates * hidden,))
        return int(weights.input.shape[0])
    if weights.input is not None or weights.bias is not None:
        raise ContractError("weights.input and weights.bias belong together: pass both, or neither")
    return gates * hidden


def check_gated_data(x: Ragged, columns: int | None) -> None:
    """Raises ContractError unless the data are rows of `columns` numbers, or ids if `columns` is None."""
    if columns is None:
        check_ids(x)
    else:
        check_shape("x.data", x.data, (None, columns))
    check_ragged(x)


def with_table(run: RunKernel) -> RunKernel:
    """Add layers over token ids to a backend without them: gather the gate inputs of all tokens before it runs."""

    def run_with_table(x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
        if weights.table is None:
            return run(x, weights, state, want=want)
        gates = Ragged(embed(x.data, weights.table, weights.table.dtype), x.offsets)
        return run(gates, weights.over_gate_inputs, state, want=want)

    return run_with_table
