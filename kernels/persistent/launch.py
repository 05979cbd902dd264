"""The launches of a layer: `cluster` (cluster.cu), `grid` (grid.cu), `wide` (wide.cu) and `step` (step.cu); `persistent`, the faster of the
first two; and `adaptive`, the fastest of all for a number of rows and steps, which also runs several levels at once in wide.cu. Layers with
two dependent products in each step run in two_products.cu, in a cluster or in a grid.

The first three hold their recurrent weights in registers and shared memory for all steps; `step` reads them in every step. Weights are
float16 or bfloat16; sums and cells are float32. A float32 weight is two float16 numbers or, where TF32 is allowed, one, which has the 11
significant bits of TF32. `cluster` and `grid` sum in the same order wherever the number of rows chooses between them, `wide` and `step` in
others: a row of `adaptive` may differ in its last bits with the numbers of rows and steps in its batch. Nothing waits for the device. A
call may be captured in a CUDA graph: offsets, slots and values are read when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backend import Backend, Problem, allows_tf32
from kernels.embedding import embed
from kernels.gated import PROJECTION
from kernels.launching import (
    address,
    aligned_inputs,
    as_gate_dtype,
    as_int32,
    ceil_div,
    check_state_cache,
    on_device,
    pack_once,
    row_sources,
)
from kernels.persistent.choice import (
    CLUSTERS,
    FindShape,
    Launches,
    LaunchPlan,
    PersistentCell,
    Refuses,
    adaptive_refusal,
    adaptive_shape,
    bounded_steps,
    cluster_shape,
    describe,
    fastest_shape,
    grid_shape,
    launch_plan,
    levels_shape,
    shape_refusal,
    step_refusal,
    step_shape,
    wide_shape,
)
from kernels.persistent.packing import Packing, Variant, WidePacking, scale_of
from kernels.persistent.step import StepPacking, StepShape, meetings
from kernels.persistent.two_products import TwoProductsPacking
from kernels.ragged import ContractError, Encoded, Outputs, Ragged, without_sources

FEW = 4
"""Steps that hardly overlap if several levels run at once."""


class _Product(NamedTuple):
    """A recurrent product. packed, scale: as `_packed` returns them; width: units that the kernel computes from the sums."""

    packed: Tensor
    scale: Tensor | None
    width: int


class _Side(NamedTuple):
    """What a launch reads and writes for one direction or level. gates_apart: from one token's gate inputs to the next; arrays: as in
    `Call` of cell.cuh; more: the members of `Step` of step.cu after its call."""

    gates: Tensor
    gates_apart: int
    products: Sequence[_Product]
    arrays: Sequence[Tensor | None]
    forward: bool
    more: Sequence[int] = ()


class _Inputs(NamedTuple):
    """The inputs of a direction. gates: gate inputs, `apart` from row to row, in the row of the token, or of the token's id; data: what the
    kernel itself multiplies by the input weights, or None."""

    gates: Tensor
    apart: int
    ids: Tensor | None = None
    data: Tensor | None = None

    def more(self, words: int) -> tuple[int, ...]:
        """Return the members of `Step` of step.cu after its call. words: of `Meetings`. Without tokens, nothing is multiplied."""
        ids, data = self.ids, self.data
        wide, apart = ids is not None and ids.dtype == torch.int64, 0 if data is None else data.stride(0)
        return address(data), address(ids), words, wide, apart, data.shape[1] if data is not None and len(data) else 0


@dataclass(frozen=True, slots=True)
class _SideBySide:
    """An array of the input products of both directions. second: the weights of the second direction."""

    second: Any
    array: Tensor

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (self.array,)


def backends(cell: PersistentCell) -> tuple[Backend, ...]:
    """Return the backends of a cell: `adaptive` and `persistent`, which choose among the others, and those by name."""
    no_room = "this device has no room"
    ways: tuple[tuple[str, FindShape, Refuses], ...] = (
        ("adaptive", adaptive_shape, adaptive_refusal),
        ("persistent", fastest_shape, partial(shape_refusal, fastest_shape, (8, 0), no_room)),
        ("cluster", cluster_shape, partial(shape_refusal, cluster_shape, CLUSTERS, "no cluster of this device has room")),
        ("grid", grid_shape, partial(shape_refusal, grid_shape, (8, 0), no_room, halves=True)),
        ("wide", wide_shape, partial(shape_refusal, wide_shape, (9, 0), no_room, until=(10, 0), halves=True)),
        ("step", step_shape, step_refusal),
    )
    return tuple(
        Backend(
            name,
            partial(encode, cell, find_shape),
            partial(refuses, cell),
            partial(describe, cell, find_shape) if name in ("adaptive", "persistent") else None,
            partial(encode_both, cell, find_shape),
            partial(encode_levels, cell) if name == "adaptive" else None,
            runs=cell.runs if name != "step" else tuple(variant for variant in cell.runs if variant != PROJECTION),
            pinned=name != "adaptive",
        )
        for name, find_shape, refuses in ways
    )


def encode(cell: PersistentCell, find_shape: FindShape, x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
    """Encode every row in one direction. Without slots, `last` and the new hidden state share their memory."""
    encoded = _encode(cell, find_shape, x, (weights,), (state,), want)
    return replace(encoded, state=encoded.state[0])


def encode_both(cell: PersistentCell, find_shape: FindShape, x: Ragged, weights: Any, states: Any, *, want: Outputs) -> Encoded:
    """Encode every row in both directions, as `kernels.directions.compose_directions` describes, in one launch if the device has room."""
    return _encode(cell, find_shape, x, weights, states or (None, None), want)


def encode_levels(
    cell: PersistentCell, x: Ragged, weights: Sequence[Any], states: Sequence[Any] | None, *, want: Outputs
) -> Encoded:
    """Encode every row by levels in one direction, as `kernels.directions.compose_levels` describes. As many levels run at once as are
    faster that way."""
    before = [None] * len(weights) if states is None else states
    after: list[Any] = []
    while len(after) < len(weights):
        first = len(after)
        together = _levels_together(cell, x, weights[first:])
        until = first + together
        level_want = want if until == len(weights) else Outputs(steps=True)
        run = partial(_encode_together, cell) if together > 1 else partial(_encode, cell, adaptive_shape)
        encoded = run(x, weights[first:until], before[first:until], level_want)
        after += encoded.state
        if encoded.steps is not None:
            x = Ragged(encoded.steps, x.offsets)
    return replace(encoded, state=tuple(after))


def _encode(
    cell: PersistentCell, find_shape: FindShape, x: Ragged, weights: Sequence[Any], states: Sequence[Any], want: Outputs
) -> Encoded:
    """Run the input products and then the kernel, for one direction or for both."""
    rows, first, directions = x.rows, weights[0], len(weights)
    like, vector = first.recurrent, first.vector
    after = tuple(_state_after(cell, state, like, rows, first) for state in states)
    encoded = _outputs(like, len(x.data), rows, directions * vector, want, after, after[0] if directions == 1 else None)
    if not rows:
        return encoded
    variant = _variant(cell, x, first)
    steps = bounded_steps(variant, find_shape, ceil_div(len(x.data), rows))
    plan = launch_plan(cell.name, find_shape, variant, directions, rows, steps)
    by_step = isinstance(plan.packing, StepPacking)
    inputs = _inputs(x, weights, by_step=by_step)
    if by_step:
        _check_alignment(cell, after)
    outputs = _written(encoded)
    sides = [
        _Side(
            of_side.gates,
            of_side.apart,
            _products(weights[side], plan.packing, variant.storage, with_inputs=of_side.data is not None),
            _read_and_written(
                cell,
                weights[side],
                _before(cell, states[side], plan),
                after[side],
                [None if output is None else output[:, side * vector :] for output in outputs],
            ),
            forward=side == 0,
            more=of_side.more(meetings(like.device).take(weights[side])) if by_step else (),
        )
        for side, of_side in enumerate(inputs)
    ]
    _run(plan.launches, sides, x.offsets.contiguous(), like, directions * vector)
    return encoded


def _encode_together(cell: PersistentCell, x: Ragged, weights: Sequence[Any], states: Sequence[Any], want: Outputs) -> Encoded:
    """Run the input product of the first level and then all levels in one kernel."""
    (gates,) = _gate_inputs(x, weights[:1])
    rows, hidden, levels = x.rows, weights[0].hidden, len(weights)
    after = tuple(_state_after(cell, state, gates, rows, weights[0]) for state in states)
    encoded = _outputs(gates, len(x.data), rows, hidden, want, after, after[-1])
    variant = _variant(cell, x, weights[0])
    shape = levels_shape(variant, rows, levels)
    assert shape is not None, "a shape for these levels has been found before"
    nothing: list[Tensor | None] = [None] * len(_written(encoded))
    sides = []
    for level, layer in enumerate(weights):
        bias = None if level == 0 else _bias(layer, gates.dtype)
        sides.append(
            _Side(
                gates if bias is None else bias,
                gates.stride(0) if bias is None else 0,
                _products(layer, shape.packing, variant.storage)
                if bias is None
                else (_with_inputs(layer, shape.packing, variant.storage),),
                _read_and_written(
                    cell, layer, states[level], after[level], _written(encoded) if layer is weights[-1] else nothing
                ),
                forward=True,
            )
        )
    most = shape.max_rows()
    bounds = [(first, min(rows, first + most)) for first in range(0, rows, most)]
    launches = [(tuple(range(levels)), first, until, shape.launch(until - first)) for first, until in bounds]
    _run(launches, sides, x.offsets.contiguous(), gates, hidden)
    return encoded


def _run(launches: Launches, sides: Sequence[_Side], offsets: Tensor, like: Tensor, width: int) -> None:
    """Run the launches. width: from one row's outputs to the next."""
    wide = offsets.dtype == torch.int64
    with on_device(like.device):
        for numbers, first, until, launch in launches:
            words = (len(numbers), launch.exchange_words)
            exchange = like.new_empty(words, dtype=torch.int32) if launch.exchange_words else None
            if exchange is not None and launch.zeroed:
                exchange.zero_()
            members: list[int] = []
            for place, number in enumerate(numbers):
                side = sides[number]
                for product in side.products:
                    exchanged = None if exchange is None else exchange[place]
                    own, *others = side.arrays
                    members += map(address, (side.gates, product.packed, product.scale, own, offsets, *others, exchanged))
                    members += (wide, first, until, product.width, launch.octets, launch.width, side.forward)
                    members += (side.gates_apart, width)
            more = sides[numbers[0]].more
            grid = launch.blocks * len(numbers), 1, 1
            launch.kernel.launch(grid, launch.shared, (*members, launch.blocks, *more), early=launch.early)


def _outputs(like: Tensor, tokens: int, rows: int, width: int, want: Outputs, after: tuple[Any, ...], only: Any) -> Encoded:
    """Return new arrays for the wanted outputs. only: the new state whose hidden values are the last output, if there is one such state;
    without slots, both share their memory."""
    shared = None if only is None or only.slots is not None else only.hidden
    return Encoded(
        state=after,
        steps=_new(like, tokens, width) if want.steps else None,
        last=(_new(like, rows, width) if shared is None else shared) if want.last else None,
        mean=_new(like, rows, width) if want.mean else None,
        max=_new(like, rows, width) if want.max else None,
    )


def _written(encoded: Encoded) -> tuple[Tensor | None, ...]:
    """Return the outputs that a kernel writes besides states: an output that is a new hidden state is none of them."""
    is_state = any(encoded.last is state.hidden for state in encoded.state)
    return encoded.steps, None if is_state else encoded.last, encoded.mean, encoded.max


def _read_and_written(
    cell: PersistentCell, layer: Any, before: Any, after: Any, outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the arrays of `_Side`."""
    return (
        _own(cell, layer),
        *_slots(before, after),
        *_arrays(cell, before),
        *_arrays(cell, after),
        *outputs,
    )


def _variant(cell: PersistentCell, x: Ragged, layer: Any) -> Variant:
    """Return the variant of the kernels that runs a layer over this batch."""
    storage = layer.recurrent.dtype
    tf32 = allows_tf32(x.data.device, storage)
    problem = Problem(x.data.device, storage, layer.hidden, layer.variants, layer.vector, tf32=tf32)
    if layer.input is not None:
        float32 = storage == torch.float32
        return cell.variant(problem, gates_float32=float32)._replace(data_float32=not float32 and x.data.dtype == torch.float32)
    gates = as_gate_dtype(x.data if layer.table is None else layer.table[:0], storage)
    return cell.variant(problem, gates_float32=gates.dtype == torch.float32)


def _levels_together(cell: PersistentCell, x: Ragged, weights: Sequence[Any]) -> int:
    """Return how many of these levels, from the first, run at once."""
    first = weights[0]
    if not x.rows or any(layer.hidden != first.hidden or layer.variants != first.variants for layer in weights[1:]):
        return 1
    variant = _variant(cell, x, first)
    steps = ceil_div(len(x.data), x.rows)
    if steps <= FEW and isinstance(adaptive_shape(variant, x.rows, 1, steps), StepShape):
        return 1
    return next((levels for levels in range(len(weights), 1, -1) if levels_shape(variant, x.rows, levels)), 1)


def _gate_inputs(x: Ragged, weights: Sequence[Any]) -> list[Tensor]:
    """Return the gate inputs of each direction, (tokens, 4 or 3 x hidden), in the dtype of the weights or in float32."""
    storage = weights[0].recurrent.dtype
    if weights[0].table is not None:
        return [_aligned(embed(x.data, table, table.dtype)) for table in map(_table, weights)]
    if weights[0].input is None:
        return [_aligned(as_gate_dtype(x.data, storage))] * len(weights)
    data = x.data if x.data.dtype == storage else x.data.to(storage)
    gates = torch.addmm(_side_by_side(weights, "bias"), data, _side_by_side(weights, "input"))
    return list(_aligned(gates).chunk(len(weights), dim=1))


def _inputs(x: Ragged, weights: Sequence[Any], *, by_step: bool) -> list[_Inputs]:
    """Return the inputs of each direction. by_step: for step.cu, which looks ids up and multiplies data by 16-bit weights itself."""
    first, dtype = weights[0], weights[0].recurrent.dtype
    if by_step and first.table is not None:
        ids = x.data.contiguous()
        return [_Inputs(table, table.stride(0), ids=ids) for table in map(_table, weights)]
    if by_step and first.input is not None and dtype != torch.float32:
        data = aligned_inputs(x.data if x.data.dtype in (torch.float32, dtype) else x.data.to(dtype))
        return [_Inputs(_bias(layer, dtype), 0, data=data) for layer in weights]
    return [_Inputs(gates, gates.stride(0)) for gates in _gate_inputs(x, weights)]


def _side_by_side(weights: Sequence[Any], name: str) -> Tensor:
    """Return an array of the input product. The first direction keeps the arrays of both directions, side by side."""
    first, *others = weights
    array: Tensor = getattr(first, name)
    if not others:
        return array
    joined: _SideBySide | None = first.packed.get(("both", name))
    if joined is None or joined.second is not others[0]:
        joined = first.packed["both", name] = _SideBySide(others[0], torch.cat((array, getattr(others[0], name)), dim=-1))
    return joined.array


def _aligned(gates: Tensor) -> Tensor:
    """Return gate inputs as all kernels read them: in whole words of 4 bytes and, if a row has whole pieces of 16 bytes, from the beginning
    of a piece. They are copied if necessary."""
    start = 4 if gates.stride(0) * gates.element_size() % 16 else 16
    if gates.data_ptr() % start == 0 and gates.numel() * gates.element_size() % 4 == 0:
        return gates
    return gates.new_empty(gates.numel() + 1)[:-1].view_as(gates).copy_(gates)


def _products(
    layer: Any,
    packing: Packing | WidePacking | StepPacking | TwoProductsPacking,
    storage: torch.dtype,
    *,
    with_inputs: bool = False,
) -> Sequence[_Product]:
    """Return the recurrent products of a step in their order. storage: the dtype of the kernel's weights; with_inputs: it also multiplies
    the inputs."""
    if with_inputs:
        assert isinstance(packing, StepPacking)
        return (_with_inputs(layer, packing, storage),)
    if isinstance(packing, TwoProductsPacking):
        first, second = (_held(layer, (packing, number), storage, partial(packing.pack, layer, number)) for number in range(2))
        return _Product(first, None, layer.hidden), _Product(second, None, layer.vector)
    return (_Product(*_packed(layer, packing, storage), layer.hidden),)


def _with_inputs(layer: Any, packing: WidePacking | StepPacking, storage: torch.dtype) -> _Product:
    """Return the product of the inputs and the hidden vector."""
    packed = _held(layer, (packing, "inputs"), storage, lambda: packing.pack_with_inputs(layer.input, layer.recurrent))
    return _Product(packed, None, layer.hidden)


def _table(layer: Any) -> Tensor:
    """Return the rows of a folded table as kernels read them."""
    return pack_once(layer.packed, "table", lambda: _aligned(as_gate_dtype(layer.table, layer.recurrent.dtype)))


def _bias(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the gate inputs of every token where the kernel multiplies the data itself."""
    return pack_once(layer.packed, ("bias", dtype), lambda: _aligned(layer.bias.to(dtype)[None]))


def _packed(layer: Any, packing: Packing | WidePacking | StepPacking, storage: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the recurrent weights as the kernels read them, and the scale of float32 weights, which have two terms."""
    recurrent = layer.recurrent
    if storage != torch.float32:
        return _held(layer, packing, storage, lambda: packing.pack(recurrent)), None
    assert not isinstance(packing, WidePacking), "wide tiles have no room for weights of two terms"
    scale = pack_once(layer.packed, "scale", lambda: scale_of(recurrent))
    return pack_once(layer.packed, packing, lambda: packing.pack_terms(recurrent, scale)), scale


def _held(layer: Any, name: Any, storage: torch.dtype, pack: Callable[[], Tensor]) -> Tensor:
    """Return packed weights in another dtype than the layer's where TF32 is allowed. Weights beyond its numbers saturate."""
    if storage == layer.recurrent.dtype:
        return pack_once(layer.packed, name, pack)
    largest = torch.finfo(storage).max
    return pack_once(layer.packed, (name, storage), lambda: pack().clamp(-largest, largest).to(storage))


def _own(cell: PersistentCell, layer: Any) -> Tensor | None:
    """Return the parameters of a unit besides matrices, as the kernels read them, or None."""
    own = cell.own(layer)
    return None if own is None else pack_once(layer.packed, "own", lambda: _as_float32(own))


def _before(cell: PersistentCell, state: Any, plan: LaunchPlan) -> Any:
    """Return the state from which rows start, or a copy by row if its kernel cannot read it in its place."""
    if state is None:
        return None
    if plan.copies_state and state.sources is None:
        state = state.by_row()
    if isinstance(plan.packing, StepPacking) and state.slots is None:
        return type(state)(*(_aligned(_as_float32(getattr(state, name))) for name in cell.arrays))
    return state


def _state_after(cell: PersistentCell, state: Any, like: Tensor, rows: int, layer: Any) -> Any:
    """Return the state after the call: new arrays, or the same state caches; raises ContractError if a kernel cannot write to them."""
    if state is None or state.slots is None:
        return cell.state(*(_new(like, rows, layer.vector if name == "hidden" else layer.hidden) for name in cell.arrays))
    for name in cell.arrays:
        check_state_cache(name, getattr(state, name))
    return without_sources(state)


def _check_alignment(cell: PersistentCell, states: Sequence[Any]) -> None:
    """Raises ContractError unless states begin at whole vectors of four float32 numbers."""
    for state in states:
        for name in cell.arrays:
            if getattr(state, name).data_ptr() % 16:
                raise ContractError(f"state.{name} with slots must begin at a multiple of 16 bytes")


def _slots(before: Any, after: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the slots from which the rows start, and the slots that they write. before: a copy by row has no slots."""
    written = None if after.slots is None else as_int32(after.slots)
    return None if before is None or before.slots is None else row_sources(written, before.sources), written


def _arrays(cell: PersistentCell, state: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the hidden states and the cells, as far as there are any."""
    if state is None:
        return None, None
    arrays = [_as_float32(getattr(state, name)) for name in cell.arrays]
    return arrays[0], arrays[1] if len(arrays) > 1 else None


def _as_float32(values: Tensor) -> Tensor:
    """Return contiguous float32 values: the array itself for a state cache, which `check_state_cache` has accepted."""
    return values.float().contiguous()


def _new(like: Tensor, *sizes: int) -> Tensor:
    return like.new_empty(sizes, dtype=torch.float32)
