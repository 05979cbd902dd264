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

from kernels.launching import aligned_inputs, as_gate_dtype, pack_once
from kernels.norm import layer_norm
from kernels.ragged import Encoded, Outputs, Ragged, without_sources
from kernels.scan.forms import SKIP_COLUMNS, ScanForm
from kernels.scan.launch import backend_functions, encode
from kernels.scan.layer import Direction, array_gates, product_gates
from kernels.scan.shape import takes_library_product
from kernels.sru.types import SRUState, SRUWeights


def _encode(x: Ragged, weights: Sequence[SRUWeights], states: Sequence[SRUState | None], want: Outputs) -> Encoded:
    """Run all directions in one launch. The state is the tuple of their states."""
    first = weights[0]
    form, storage = first.scan_form(x.data), first.bias.dtype
    directions = [_direction(each, state, form) for each, state in zip(weights, states, strict=True)]
    ids: Tensor | None = None
    if first.table is not None:
        ids = x.data
        directions = [replace(direction, source=each.table) for direction, each in zip(directions, weights, strict=True)]
    elif first.input is None:
        directions = [replace(direction, source=as_gate_dtype(x.data, storage)) for direction in directions]
    elif takes_library_product(form, storage, x, want):
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


sru, bidirectional = backend_functions(_encode)
"""Encode every row in one direction, and in both. Shapes as in `kernels.sru.types`."""


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
