"""The launcher that the LSTM and the GRU share: packed weights, and one call of a compiled loop for all steps of a ragged
batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import launch
from kernels.cpu.storage import INT8, panel_storage
from kernels.cpu.threads import run_in_parts
from kernels.launching import address
from kernels.ragged import Encoded, Outputs, Ragged


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """The packed weights of an LSTM or GRU.

    hidden: the layer's units; takes_ids: whether the data are ids; arguments: for the compiled loop, the data's columns, the
    storage, the hidden size, the addresses of the input weight, the bias, the recurrent weight, the recurrent bias and the
    table, 0 for those that are missing, and the rows of the table; operations: multiplications for each token; width: of a row
    of the hidden state in scratch memory; quantized_floats, token_floats: scratch memory of a quantized hidden state, and of a
    token: its gate inputs and its quantized data; arrays: what the addresses refer to.
    """

    hidden: int
    takes_ids: bool
    arguments: tuple[int, ...]
    operations: int
    width: int
    quantized_floats: int
    token_floats: int
    arrays: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class GatedFamily:
    """A gated family on the CPU.

    loop: returns the compiled loop; state: the class of the state, with `state_arrays`; scratch_states: arrays of a row's
    hidden size that the loop keeps in scratch memory.
    """

    loop: Callable[[], Callable[..., None]]
    state: Callable[..., Any]
    state_arrays: tuple[str, ...]
    scratch_states: int


def pack_gated(weights: Any, panels: Sequence[int], recurrent_bias: Tensor | None = None) -> GatedWeights:
    """Pack the weights of an LSTM or GRU. panels: the blocks of columns that a tile computes together, in the order of the
    columns."""
    from kernels.cpu.int8 import row_floats
    from kernels.cpu.products import pack_bias, pack_blocks, pack_columns, padded, product_width

    input, bias, recurrent, table = weights.input, weights.bias, weights.recurrent, weights.table
    hidden, gates = recurrent.shape
    blocks, width = sum(panels), padded(hidden)
    storage = panel_storage(recurrent if input is None else input, recurrent, int8=weights.int8)
    parts = torch.split(recurrent, [count * hidden for count in panels], dim=1)
    packed = torch.cat([pack_blocks(part, count, storage).flatten() for part, count in zip(parts, panels, strict=True)])
    arrays = [
        None if input is None else pack_columns(input, blocks, storage),
        None if bias is None else pack_bias(bias, blocks),
        packed,
        None if recurrent_bias is None else pack_bias(recurrent_bias, 1),
        None if table is None else launch.as_floats(table),
    ]
    columns = gates if input is None else input.shape[0]
    return GatedWeights(
        hidden,
        table is not None,
        (columns, storage, hidden, *map(address, arrays), 0 if table is None else len(table)),
        operations=gates * (hidden if input is None else hidden + columns),
        width=width,
        quantized_floats=row_floats(width),
        token_floats=product_width(blocks * width) + (0 if input is None or storage != INT8 else row_floats(columns)),
        arrays=tuple(array for array in arrays if array is not None),
    )


def run_gated(family: GatedFamily, x: Ragged, weights: GatedWeights, state: Any, want: Outputs) -> Encoded:
    """Encode every row, starting from `state`, or from zeros if it is None."""
    outputs = launch.empty_outputs(x, want, weights.hidden)
    after = _run_direction(family, x, weights, state, launch.output_arguments(outputs, weights.hidden), reverse=False)
    return Encoded(after, *outputs)


def run_both(
    family: GatedFamily, x: Ragged, weights: tuple[GatedWeights, GatedWeights], states: tuple[Any, Any] | None, want: Outputs
) -> Encoded:
    """Encode every row forward and backward; the outputs are joined as [forward | backward]. The state is the pair of states."""
    hidden = weights[0].hidden
    outputs = launch.empty_outputs(x, want, 2 * hidden)
    forward, backward = (
        _run_direction(family, x, packed, state, launch.output_arguments(outputs, 2 * hidden, column), reverse=column > 0)
        for packed, state, column in zip(weights, states or (None, None), (0, hidden), strict=True)
    )
    return Encoded((forward, backward), *outputs)


def _run_direction(
    family: GatedFamily, x: Ragged, weights: GatedWeights, state: Any, outputs: tuple[int, ...], *, reverse: bool
) -> Any:
    """Run the compiled loop and return the state after the batch. outputs: of `launch.output_arguments`."""
    rows, tokens = x.rows, x.data.shape[0]
    data = x.data.contiguous() if weights.takes_ids else launch.as_floats(x.data)
    offsets = x.offsets.contiguous()
    states = launch.row_states(family.state, family.state_arrays, state, rows, weights.hidden)
    run_in_parts(
        family.loop(),
        (
            *(offsets.data_ptr(), offsets.itemsize, rows, tokens, int(reverse), data.data_ptr(), data.itemsize),
            *weights.arguments,
            *states.arguments,
            *outputs,
        ),
        rows,
        tokens * weights.operations,
        launch.scratch_bytes(
            rows,
            tokens,
            state_floats=family.scratch_states * weights.width + weights.quantized_floats,
            token_floats=weights.token_floats,
        ),
    )
    return states.after
