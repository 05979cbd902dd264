"""The SRU's fused backend: describes a layer to the scan kernels, which it shares with the QRNN.

float16 and bfloat16 layers run in one launch, from their inputs or from the rows of a table, or in two if the parts of long rows are
computed apart; a layer norm and a projection run before it. float32 layers, few long rows whose parts are not computed apart, and all
layers on GPUs other than Hopper run as a library product and one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.launching import aligned_inputs, as_gate_dtype, device_index, pack_once
from kernels.norm import layer_norm
from kernels.ragged import Encoded, Outputs, Ragged, without_sources
from kernels.scan.launch import encode
from kernels.scan.layer import NO_SKIP, SKIP_BLOCK, SKIP_COLUMNS, Direction, ScanForm, array_gates, product_gates
from kernels.scan.shape import multiplies_inputs, needs_every_step, prefers_library_product
from kernels.sru.types import SRUState, SRUWeights


def sru(x: Ragged, weights: SRUWeights, state: SRUState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.sru.types`."""
    encoded = _encode(x, (weights,), (state,), want)
    return replace(encoded, state=encoded.state[0])


def bidirectional(
    x: Ragged, weights: tuple[SRUWeights, SRUWeights], states: tuple[SRUState, SRUState] | None, *, want: Outputs
) -> Encoded:
    """Encode every row in both directions. Shapes as in `kernels.sru.types`."""
    return _encode(x, weights, states or (None, None), want)


def _encode(x: Ragged, weights: Sequence[SRUWeights], states: Sequence[SRUState | None], want: Outputs) -> Encoded:
    """Run all directions in one launch. The state is the tuple of their states."""
    first = weights[0]
    form, storage = _form(x, first), first.bias.dtype
    directions = [_direction(each, state, form) for each, state in zip(weights, states, strict=True)]
    ids: Tensor | None = None
    if first.table is not None:
        ids = x.data
        directions = [replace(direction, source=each.table) for direction, each in zip(directions, weights, strict=True)]
    elif first.input is None:
        directions = [replace(direction, source=as_gate_dtype(x.data, storage)) for direction in directions]
    elif (
        storage == torch.float32
        or not multiplies_inputs(device_index(x.offsets.device))
        or prefers_library_product(form, x.rows, len(x.data), all_steps=needs_every_step(want))
    ):
        parts = zip(directions, weights, _projected(x.data, weights), strict=True)
        directions = [replace(direction, source=data @ each.input) for direction, each, data in parts if each.input is not None]
    else:
        parts = zip(directions, weights, _projected(x.data, weights), strict=True)
        directions = [replace(direction, data=aligned_inputs(data), weights=each.input) for direction, each, data in parts]
    sources = [direction.source for direction in directions if direction.source is not None]
    gates = array_gates(sources, first.hidden, gather=ids is not None) if sources else product_gates(window=1)
    skip = as_gate_dtype(x.data, storage) if form.skip == SKIP_COLUMNS else None
    encoded, cells = encode(form, gates, x, directions, want, hidden=first.hidden, storage=storage, ids=ids, skip=skip)
    after = [
        SRUState(cell) if state is None or state.slots is None else without_sources(state)
        for state, cell in zip(states, cells, strict=True)
    ]
    return replace(encoded, state=tuple(after))


def _direction(weights: SRUWeights, state: SRUState | None, form: ScanForm) -> Direction:
    cell = weights.cell
    return Direction(
        _bias(weights, form.blocks),
        packed=weights.packed,
        own_cell=None if cell is None else pack_once(weights.packed, "cell", lambda: cell.float().contiguous()),
        before=None if state is None else state.cell,
        slots=None if state is None else state.slots,
        sources=None if state is None else state.sources,
        skip_from=weights.skip_from or 0,
        scale=weights.scale,
    )


def _form(x: Ragged, weights: SRUWeights) -> ScanForm:
    columns = next(array.shape[-1] for array in (weights.table, weights.input, x.data) if array is not None)
    blocks = columns // weights.hidden if weights.hidden else 3
    skip = SKIP_COLUMNS if weights.skip_from is not None else SKIP_BLOCK if blocks == 4 else NO_SKIP
    return ScanForm(blocks, sru=True, own_cell=weights.cell is not None, skip=skip, tanh=weights.tanh)


def _bias(weights: SRUWeights, blocks: int) -> Tensor:
    """Return the bias of all blocks, (blocks x hidden) float32. Candidate and skip have none."""

    def make() -> Tensor:
        hidden = weights.hidden
        bias = torch.zeros(blocks * hidden, dtype=torch.float32, device=weights.bias.device)
        bias[hidden : 3 * hidden] = weights.bias
        return bias

    return pack_once(weights.packed, f"bias of {blocks}", make)


def _projected(data: Tensor, weights: Sequence[SRUWeights]) -> list[Tensor]:
    """Return the data after layer norm and projection, in the dtype of the input weights, for each direction."""
    first = _normalise(data, weights[0])
    normalised = [first if each.norm is weights[0].norm else _normalise(data, each) for each in weights]
    pairs = zip(weights, normalised, strict=True)
    return [values if each.projection is None else values @ each.projection for each, values in pairs]


def _normalise(data: Tensor, weights: SRUWeights) -> Tensor:
    values = data if weights.norm is None else layer_norm(data, weights.norm)
    return values.to(weights.bias.dtype)
