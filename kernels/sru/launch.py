"""The SRU through the CUDA kernels that it shares with the QRNN: what a layer is made of, as they want it.

float16 and bfloat16 layers are one launch, from their inputs or from the rows of a table; a layer norm and a projection stand before
it. float32 ones, and few long rows, are a library product, and one launch after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged, SRUState, SRUWeights
from kernels.launching import in_either, in_pieces, kept
from kernels.norm import layer_norm
from kernels.scan.launch import (
    NO_SKIP,
    SKIP_BLOCK,
    SKIP_COLUMNS,
    Direction,
    Form,
    apart,
    encode,
    given,
    product,
)
from kernels.slots import moved_on


def sru(x: Ragged, weights: SRUWeights, state: SRUState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    encoded = _encode(x, (weights,), (state,), want)
    return replace(encoded, state=encoded.state[0])


def both(
    x: Ragged, weights: tuple[SRUWeights, SRUWeights], states: tuple[SRUState, SRUState] | None, *, want: Outputs
) -> Encoded:
    """Shapes as in `kernels.contract`."""
    return _encode(x, weights, states or (None, None), want)


def _encode(x: Ragged, weights: Sequence[SRUWeights], states: Sequence[SRUState | None], want: Outputs) -> Encoded:
    """One launch for all directions; the state is a tuple of theirs."""
    one = weights[0]
    form, storage = _form(x, one), one.bias.dtype
    made = [_direction(each, state, form) for each, state in zip(weights, states, strict=True)]
    ids: Tensor | None = None
    if one.table is not None:
        ids = x.data
        made = [replace(direction, source=each.table) for direction, each in zip(made, weights, strict=True)]
    elif one.input is None:
        made = [replace(direction, source=in_either(x.data, storage)) for direction in made]
    elif storage == torch.float32 or apart(form, one.hidden * len(weights), x.rows, len(x.data)):
        parts = zip(made, weights, _projected(x.data, weights), strict=True)
        made = [replace(direction, source=data @ each.input) for direction, each, data in parts if each.input is not None]
    else:
        parts = zip(made, weights, _projected(x.data, weights), strict=True)
        made = [replace(direction, data=in_pieces(data), weights=each.input) for direction, each, data in parts]
    sources = [direction.source for direction in made if direction.source is not None]
    gates = given(sources, one.hidden, gather=ids is not None) if sources else product(window=1)
    skip = in_either(x.data, storage) if form.skip == SKIP_COLUMNS else None
    encoded, cells = encode(form, gates, x, made, want, hidden=one.hidden, storage=storage, ids=ids, skip=skip)
    after = [
        SRUState(cell) if state is None or state.slots is None else moved_on(state)
        for state, cell in zip(states, cells, strict=True)
    ]
    return replace(encoded, state=tuple(after))


def _direction(weights: SRUWeights, state: SRUState | None, form: Form) -> Direction:
    cell = weights.cell
    return Direction(
        _bias(weights, form.blocks),
        packed=weights.packed,
        own_cell=None if cell is None else kept(weights.packed, "cell", lambda: cell.float().contiguous()),
        before=None if state is None else state.cell,
        slots=None if state is None else state.slots,
        slots_before=None if state is None else state.sources,
        skip_from=weights.skip_from or 0,
        scale=weights.scale,
    )


def _form(x: Ragged, weights: SRUWeights) -> Form:
    columns = next(array.shape[-1] for array in (weights.table, weights.input, x.data) if array is not None)
    blocks = columns // weights.hidden if weights.hidden else 3
    skip = SKIP_COLUMNS if weights.skip_from is not None else SKIP_BLOCK if blocks == 4 else NO_SKIP
    return Form(blocks, sru=True, own_cell=weights.cell is not None, skip=skip, tanh=weights.tanh)


def _bias(weights: SRUWeights, blocks: int) -> Tensor:
    """(blocks x hidden) float32: candidate and skip have none."""

    def made() -> Tensor:
        hidden = weights.hidden
        bias = torch.zeros(blocks * hidden, dtype=torch.float32, device=weights.bias.device)
        bias[hidden : 3 * hidden] = weights.bias
        return bias

    return kept(weights.packed, f"bias of {blocks}", made)


def _projected(data: Tensor, weights: Sequence[SRUWeights]) -> list[Tensor]:
    """What stands before the product of each direction with its input weights, in their dtype."""
    one = _normalised(data, weights[0])
    each_own = [one if each.norm is weights[0].norm else _normalised(data, each) for each in weights]
    return [own if each.projection is None else own @ each.projection for each, own in zip(weights, each_own, strict=True)]


def _normalised(data: Tensor, weights: SRUWeights) -> Tensor:
    values = data if weights.norm is None else layer_norm(data, weights.norm)
    return values.to(weights.bias.dtype)
