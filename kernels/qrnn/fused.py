"""The QRNN's fused backend: describes a layer to the scan kernels, which it shares with the SRU.

float16 and bfloat16 layers run in one launch, from their inputs or from the rows of tables, or in two if the parts of long rows are
computed apart. float32 layers, few long rows whose parts are not computed apart, and all layers on GPUs other than Hopper run as a
library product and one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.embedding import FIRST
from kernels.launching import aligned_inputs, as_gate_dtype, pack_once
from kernels.qrnn.types import QRNNState, QRNNWeights
from kernels.ragged import Encoded, Outputs, Ragged, source_slots, without_sources
from kernels.scan.launch import backend_functions, encode
from kernels.scan.layer import Direction, array_gates, product_gates
from kernels.scan.shape import takes_library_product


@dataclass(frozen=True, slots=True)
class _ScanInputs:
    """The directions as the kernels read them, and the ids if gates come from tables."""

    directions: list[Direction]
    ids: Tensor | None = None


def _encode(x: Ragged, weights: Sequence[QRNNWeights], states: Sequence[QRNNState | None], want: Outputs) -> Encoded:
    """Run all directions in one launch. The state is the tuple of their states."""
    first = weights[0]
    inputs = _scan_inputs(x, weights, states, want)
    sources = [direction.source for direction in inputs.directions if direction.source is not None]
    gather = inputs.ids is not None
    summed = first.window if gather else 1
    gates = array_gates(sources, first.hidden, window=summed, gather=gather) if sources else product_gates(first.window)
    encoded, cells = encode(
        first.scan_form, gates, x, inputs.directions, want, hidden=first.hidden, storage=first.bias.dtype, ids=inputs.ids
    )
    lefts = _lefts_after(x, first, inputs)
    after = [_state_after(state, cell, left) for state, cell, left in zip(states, cells, lefts, strict=True)]
    return replace(encoded, state=tuple(after))


qrnn, bidirectional = backend_functions(_encode)
"""Encode every row in one direction, and in both. Shapes as in `kernels.qrnn.types`."""


def _scan_inputs(x: Ragged, weights: Sequence[QRNNWeights], states: Sequence[QRNNState | None], want: Outputs) -> _ScanInputs:
    first = weights[0]
    storage, steps_before = first.bias.dtype, first.window - 1
    directions = [_direction(each, state) for each, state in zip(weights, states, strict=True)]
    lefts = [None if state is None else _left_by_row(state) for state in states]
    if first.tables is not None:
        after = x.offsets.new_empty(len(weights), x.rows, steps_before, dtype=torch.int64)
        tables = zip(directions, weights, lefts, after, strict=True)
        return _ScanInputs(
            [replace(direction, source=each.tables, left=left, left_after=room) for direction, each, left, room in tables],
            x.data,
        )
    if first.input is None:
        return _ScanInputs([replace(direction, source=as_gate_dtype(x.data, storage)) for direction in directions])
    if takes_library_product(first.scan_form, storage, x, want):
        return _library_products(x, weights, directions, lefts)
    data = aligned_inputs(x.data.to(storage))
    after = data.new_empty(len(weights), x.rows, steps_before, data.shape[1])
    aligned = [None if left is None else aligned_inputs(left.to(storage)) for left in lefts]
    parts = zip(directions, weights, aligned, after, strict=True)
    return _ScanInputs(
        [replace(direction, data=data, weights=each.input, left=left, left_after=room) for direction, each, left, room in parts]
    )


def _library_products(
    x: Ragged, weights: Sequence[QRNNWeights], directions: Sequence[Direction], lefts: Sequence[Tensor | None]
) -> _ScanInputs:
    """Multiply the joined steps of each window with the weights, by one library product for each direction."""
    storage, window = weights[0].bias.dtype, weights[0].window
    matrices = [each.input.flatten(0, 1) for each in weights if each.input is not None]
    if window == 1:
        data = x.data.to(storage)
        pairs = zip(directions, matrices, strict=True)
        return _ScanInputs([replace(direction, source=data @ matrix) for direction, matrix in pairs])
    lines = [_lines(x, left, storage) for left in lefts]
    indices = [_window_lines(x, window, left is not None, backward=number == 1) for number, left in enumerate(lefts)]
    parts = zip(directions, matrices, lines, indices, strict=True)
    return _ScanInputs(
        [
            replace(direction, source=line[windows].flatten(1) @ matrix, left_after=line[after])
            for direction, matrix, line, (windows, after) in parts
        ]
    )


def _window_lines(x: Ragged, window: int, has_left: bool, *, backward: bool) -> tuple[Tensor, Tensor]:
    """Return the indices into `_lines` of the steps in each window, (tokens, window), the present step first, and of the steps before
    each row's next chunk, (rows, window - 1), oldest first."""
    offsets, back = x.offsets.long(), torch.arange(window, device=x.offsets.device)
    token = torch.arange(len(x.data), device=offsets.device)
    row = (torch.searchsorted(offsets, token, right=True) - 1).clamp_(
        max=x.rows - 1
    )  # tokens after the last row are in bounds too
    before = offsets[row + 1] - 1 - token if backward else token - offsets[row]
    in_chunk = token[:, None] + (back if backward else -back) + FIRST
    in_left = FIRST + len(x.data) + row[:, None] * (window - 1) + window - 1 - back + before[:, None]
    windows = in_chunk.where(before[:, None] >= back, in_left if has_left else 0)
    left = FIRST + len(x.data) + torch.arange(x.rows * (window - 1), device=offsets.device).view(x.rows, window - 1)
    without_steps = left if has_left else torch.zeros_like(left)
    if not len(x.data):
        return windows, without_steps
    last = (offsets[:-1] if backward else offsets[1:] - 1).clamp(0, len(x.data) - 1)
    return windows, windows[last, : window - 1].flip(1).where(torch.diff(offsets)[:, None] > 0, without_steps)


def _lefts_after(x: Ragged, weights: QRNNWeights, inputs: _ScanInputs) -> list[Tensor]:
    """Return `QRNNState.left` after the call for each direction: (rows, window - 1, inputs), or for ids (rows, window - 1)."""
    lefts = [direction.left_after for direction in inputs.directions if direction.left_after is not None]
    if weights.tables is not None:
        return lefts
    if weights.window == 1:
        return [x.data.new_empty(x.rows, 0, x.data.shape[1])] * len(inputs.directions)
    return [left[..., : weights.columns] for left in lefts]


def _direction(weights: QRNNWeights, state: QRNNState | None) -> Direction:
    bias = pack_once(weights.packed, "bias", lambda: weights.bias.float().contiguous())
    if state is None:
        return Direction(bias, packed=weights.packed)
    return Direction(bias, packed=weights.packed, before=state.cell, slots=state.slots, sources=state.sources)


def _left_by_row(state: QRNNState) -> Tensor:
    slots = source_slots(state)
    return state.left if slots is None else state.left[slots]


def _lines(x: Ragged, left: Tensor | None, storage: torch.dtype) -> Tensor:
    """Return a line of zeros, then the inputs, then the steps before the rows."""
    data = x.data.to(storage)
    parts = [data.new_zeros(FIRST, data.shape[1]), data]
    return torch.cat(parts if left is None else [*parts, left.to(storage).flatten(0, 1)])


def _state_after(before: QRNNState | None, cell: Tensor, left: Tensor) -> QRNNState:
    """Return the state after the call. With slots, it is in the same state caches; the kernel has already written the cells."""
    if before is None or before.slots is None:
        return QRNNState(cell, left)
    before.left.index_copy_(0, before.slots.long(), left.to(before.left.dtype))
    return without_sources(before)
