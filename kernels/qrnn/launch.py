"""The QRNN through the CUDA kernels that it shares with the SRU: what a layer is made of, as they want it.

float16 and bfloat16 layers are one launch, from their inputs or from the rows of tables. float32 ones, and few long rows, are a
library product, and one launch after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.contract import POOLINGS, Encoded, Outputs, QRNNState, QRNNWeights, Ragged, origins
from kernels.embedding import FIRST
from kernels.launching import in_either, in_pieces, kept
from kernels.scan.launch import Direction, Form, apart, encode, given, product
from kernels.slots import moved_on


def qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    encoded = _encode(x, (weights,), (state,), want)
    return replace(encoded, state=encoded.state[0])


def both(
    x: Ragged, weights: tuple[QRNNWeights, QRNNWeights], states: tuple[QRNNState, QRNNState] | None, *, want: Outputs
) -> Encoded:
    """Shapes as in `kernels.contract`."""
    return _encode(x, weights, states or (None, None), want)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Each direction as the kernels take it, and the ids, if gates come through such."""

    directions: list[Direction]
    ids: Tensor | None = None


def _encode(x: Ragged, weights: Sequence[QRNNWeights], states: Sequence[QRNNState | None], want: Outputs) -> Encoded:
    """One launch for all directions; the state is a tuple of theirs."""
    one = weights[0]
    taken = _taken(x, weights, states)
    sources = [direction.source for direction in taken.directions if direction.source is not None]
    gathered = taken.ids is not None
    summed = one.window if gathered else 1
    gates = given(sources, one.hidden, window=summed, gather=gathered) if sources else product(one.window)
    encoded, cells = encode(
        _form(one), gates, x, taken.directions, want, hidden=one.hidden, storage=one.bias.dtype, ids=taken.ids
    )
    after = [_state(state, cell, left) for state, cell, left in zip(states, cells, _lefts_after(x, one, taken), strict=True)]
    return replace(encoded, state=tuple(after))


def _taken(x: Ragged, weights: Sequence[QRNNWeights], states: Sequence[QRNNState | None]) -> _Taken:
    one = weights[0]
    storage, steps_before = one.bias.dtype, one.window - 1
    made = [_direction(each, state) for each, state in zip(weights, states, strict=True)]
    lefts = [None if state is None else _left(state) for state in states]
    if one.tables is not None:
        after = x.offsets.new_empty(len(weights), x.rows, steps_before, dtype=torch.int64)
        pairs = zip(made, weights, lefts, after, strict=True)
        return _Taken([replace(each, source=own.tables, left=left, left_after=room) for each, own, left, room in pairs], x.data)
    if one.input is None:
        return _Taken([replace(each, source=in_either(x.data, storage)) for each in made])
    if storage == torch.float32 or apart(_form(one), one.hidden * len(weights), x.rows, len(x.data)):
        return _products(x, weights, made, lefts)
    data = in_pieces(x.data.to(storage))
    after = data.new_empty(len(weights), x.rows, steps_before, data.shape[1])
    pieces = [None if left is None else in_pieces(left.to(storage)) for left in lefts]
    parts = zip(made, weights, pieces, after, strict=True)
    return _Taken([replace(each, data=data, weights=own.input, left=left, left_after=room) for each, own, left, room in parts])


def _products(x: Ragged, weights: Sequence[QRNNWeights], made: Sequence[Direction], lefts: Sequence[Tensor | None]) -> _Taken:
    """One by the library for each direction, of the steps that each step sees, side by side."""
    storage, window = weights[0].bias.dtype, weights[0].window
    inputs = [each.input.flatten(0, 1) for each in weights if each.input is not None]
    if window == 1:
        data = x.data.to(storage)
        return _Taken([replace(each, source=data @ own) for each, own in zip(made, inputs, strict=True)])
    lines = [_lines(x, left, storage) for left in lefts]
    seen = [_seen(x, window, left is not None, backward=number == 1) for number, left in enumerate(lefts)]
    parts = zip(made, inputs, lines, seen, strict=True)
    directions = [
        replace(each, source=line[at].flatten(1) @ own, left_after=line[after]) for each, own, line, (at, after) in parts
    ]
    return _Taken(directions)


def _seen(x: Ragged, window: int, has_left: bool, *, backward: bool) -> tuple[Tensor, Tensor]:
    """Which of the lines each step sees, (tokens, window), the present one first; and which stand before each row's next chunk,
    (rows, window - 1), oldest first."""
    offsets, back = x.offsets.long(), torch.arange(window, device=x.offsets.device)
    token = torch.arange(len(x.data), device=offsets.device)
    row = (torch.searchsorted(offsets, token, right=True) - 1).clamp_(max=x.rows - 1)  # of tokens after all rows, too
    before = offsets[row + 1] - 1 - token if backward else token - offsets[row]
    own = token[:, None] + (back if backward else -back) + FIRST
    earlier = FIRST + len(x.data) + row[:, None] * (window - 1) + window - 1 - back + before[:, None]
    seen = own.where(before[:, None] >= back, earlier if has_left else 0)
    left = FIRST + len(x.data) + torch.arange(x.rows * (window - 1), device=offsets.device).view(x.rows, window - 1)
    nothing = left if has_left else torch.zeros_like(left)
    if not len(x.data):
        return seen, nothing
    last = (offsets[:-1] if backward else offsets[1:] - 1).clamp(0, len(x.data) - 1)
    return seen, seen[last, : window - 1].flip(1).where(torch.diff(offsets)[:, None] > 0, nothing)


def _lefts_after(x: Ragged, weights: QRNNWeights, taken: _Taken) -> list[Tensor]:
    """(rows, window - 1, inputs), or of ids (rows, window - 1), by direction."""
    rooms = [each.left_after for each in taken.directions if each.left_after is not None]
    if weights.tables is not None:
        return rooms
    if weights.window == 1:
        return [x.data.new_empty(x.rows, 0, x.data.shape[1])] * len(taken.directions)
    return [room[..., : weights.columns] for room in rooms]


def _form(weights: QRNNWeights) -> Form:
    return Form(POOLINGS[weights.pooling])


def _direction(weights: QRNNWeights, state: QRNNState | None) -> Direction:
    bias = kept(weights.packed, "bias", lambda: weights.bias.float().contiguous())
    if state is None:
        return Direction(bias, packed=weights.packed)
    return Direction(bias, packed=weights.packed, before=state.cell, slots=state.slots, slots_before=state.sources)


def _left(state: QRNNState) -> Tensor:
    """By row."""
    places = origins(state)
    return state.left if places is None else state.left[places]


def _lines(x: Ragged, left: Tensor | None, storage: torch.dtype) -> Tensor:
    """Zeros, the inputs, and what stands before the rows."""
    data = x.data.to(storage)
    parts = [data.new_zeros(FIRST, data.shape[1]), data]
    return torch.cat(parts if left is None else [*parts, left.to(storage).flatten(0, 1)])


def _state(before: QRNNState | None, cell: Tensor, left: Tensor) -> QRNNState:
    """In its slots, where the one before has such; the cells are there already."""
    if before is None or before.slots is None:
        return QRNNState(cell, left)
    before.left.index_copy_(0, before.slots.long(), left.to(before.left.dtype))
    return moved_on(before)
