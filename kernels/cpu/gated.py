"""The launcher that the LSTM and the GRU share: packed weights, and one call of a compiled loop for all steps of a ragged
batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backend import Backend
from kernels.cpu import launch
from kernels.cpu.cache import refuses
from kernels.cpu.storage import INT8, panel_storage
from kernels.cpu.threads import run_in_parts
from kernels.launching import address
from kernels.ragged import Ragged


class GatedArguments(NamedTuple):
    """The packed weights as the compiled loop takes them. columns: of the data. The address of missing weights is 0."""

    columns: int
    storage: int
    hidden: int
    input: int
    bias: int
    recurrent: int
    recurrent_bias: int
    table: int
    table_rows: int


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """The packed weights of an LSTM or GRU.

    takes_ids: whether the data are ids; operations: multiplications for each token; width: of a row of the hidden state in scratch
    memory; quantized_floats, token_floats: scratch memory of a quantized hidden state, and of a token: its gate inputs and its
    quantized data; arrays: what the addresses refer to.
    """

    takes_ids: bool
    arguments: GatedArguments
    operations: int
    width: int
    quantized_floats: int
    token_floats: int
    arrays: tuple[Tensor, ...]


def pack_gated(weights: Any, panels: Sequence[int]) -> GatedWeights:
    """Pack the weights of an LSTM or GRU. panels: the blocks of columns that a tile computes together, in the order of the
    columns."""
    from kernels.cpu.int8 import row_floats
    from kernels.cpu.products import pack_bias, pack_blocks, pack_columns, padded, product_width

    input, bias, recurrent, table = weights.input, weights.bias, weights.recurrent, weights.table
    recurrent_bias: Tensor | None = getattr(weights, "recurrent_bias", None)
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
        table is not None,
        GatedArguments._make((columns, storage, hidden, *map(address, arrays), 0 if table is None else len(table))),
        operations=gates * (hidden if input is None else hidden + columns),
        width=width,
        quantized_floats=row_floats(width),
        token_floats=product_width(blocks * width) + (0 if input is None or storage != INT8 else row_floats(columns)),
        arrays=tuple(array for array in arrays if array is not None),
    )


@dataclass(frozen=True, slots=True)
class GatedLoop:
    """The compiled loop of a gated family, and its backend for a CPU.

    module: has the loop as `run`; state: the class of the state, with `state_arrays`; scratch_states: arrays of a row's hidden size that
    the loop keeps in scratch memory; panels: returns the gates that a tile of these weights computes together.
    """

    module: str
    state: Callable[..., Any]
    state_arrays: tuple[str, ...]
    scratch_states: int
    panels: Callable[[Any], Sequence[int]]

    def backend(self, runs: tuple[str, ...] = ()) -> Backend:
        """Return the backend. runs: as in `Backend`."""
        run, run_both = launch.backend_functions(self._run_direction)
        return Backend("cpu", run, refuses, bidirectional=run_both, runs=runs)

    def _run_direction(self, x: Ragged, layer: Any, state: Any, outputs: launch.Arguments, reverse: int) -> Any:
        """Run the compiled loop and return the state after the batch. outputs: of `launch.output_arguments`."""
        weights: GatedWeights | None = layer.packed.get("cpu")
        if weights is None:
            weights = layer.packed["cpu"] = pack_gated(layer, self.panels(layer))
        rows, tokens = x.rows, x.data.shape[0]
        data = x.data.contiguous() if weights.takes_ids else launch.as_floats(x.data)
        offsets = x.offsets.contiguous()
        states, after, kept = launch.row_states(self.state, self.state_arrays, state, rows, weights.arguments.hidden)
        run_in_parts(
            launch.loops(self.module).run,
            (
                (offsets.data_ptr(), offsets.itemsize, rows, tokens, reverse),
                *(data.data_ptr(), data.itemsize, weights.arguments, *states, outputs),
            ),
            rows,
            tokens * weights.operations,
            launch.scratch_bytes(
                rows,
                tokens,
                state_floats=self.scratch_states * weights.width + weights.quantized_floats,
                token_floats=weights.token_floats,
            ),
        )
        del kept  # the addresses refer to them until here
        return after
