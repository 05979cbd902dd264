"""The launches of a layer: `cluster` (cluster.cu), `grid` (grid.cu) and `wide` (wide.cu); `persistent`, the faster of the first two; and
`adaptive`, the fastest of all three for a number of rows, which also runs several levels at once in wide.cu. Layers with two dependent
products in each step run in two_products.cu, in a cluster or in a grid.

The kernels hold their recurrent weights in registers and shared memory for all steps, in float16 or bfloat16; sums and cells are
float32. A float32 weight is two float16 numbers or, where TF32 is allowed, one, which has the 11 significant bits of TF32. `cluster` and
`grid` sum in the same order wherever the number of rows chooses between them, `wide` in another: a row of `adaptive` may differ in its
last bits with the number of rows in its batch. Nothing waits for the device. A call may be captured in a CUDA graph: offsets, slots and
values are read when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backend import Backend, Problem, allows_tf32
from kernels.embedding import embed
from kernels.gated import PEEPHOLES, PROJECTION, RESET_BEFORE
from kernels.launching import (
    Capability,
    address,
    as_gate_dtype,
    as_int32,
    ceil_div,
    check_state_cache,
    device_index,
    device_refusal,
    on_device,
    pack_once,
    row_sources,
)
from kernels.persistent.cluster import ClusterShape
from kernels.persistent.grid import GridShape
from kernels.persistent.packing import HERE, Launch, Packing, Variant, WidePacking, scale_of
from kernels.persistent.two_products import TwoProductsCluster, TwoProductsGrid, TwoProductsPacking
from kernels.persistent.wide import WideShape
from kernels.ragged import ContractError, Encoded, Outputs, Ragged, without_sources
from kernels.tuning import load_tuned, matching_shapes

PersistentShape = ClusterShape | GridShape | WideShape | TwoProductsCluster | TwoProductsGrid
FindShape = Callable[[Variant, int, int], PersistentShape | None]
"""Returns the shape for a variant, the rows of all directions, and the number of directions. Whether there is one depends on the variant
alone."""
Launches = Sequence[tuple[tuple[int, ...], int, int, Launch]]
"""Launches with the numbers of their directions or levels, their first row and the row after their last."""
Kinds = Mapping[str, Callable[[Variant, int], PersistentShape]]
"""Classes of shapes, by the name of their size in the files of `tuned`."""
Refuses = Callable[["Family", Problem], str | None]
CLUSTERS: Capability = (9, 0)
"""The lowest compute capability with clusters, which float32 weights need: the grid has no room for two terms."""
MANY = 1 << 30
"""A number of rows that no bound of a shape admits."""
CLUSTER: Kinds = {"blocks": ClusterShape}
GRID: Kinds = {"units": GridShape}
WIDE: Kinds = {"tile": WideShape}
PERSISTENT: Kinds = {**CLUSTER, **GRID}
ADAPTIVE: Kinds = {**PERSISTENT, **WIDE}
APART = "apart"
"""The kind of levels that run one after the other."""
TWO_PRODUCTS: Kinds = {"blocks": TwoProductsCluster, "units": TwoProductsGrid}


@dataclass(frozen=True, slots=True)
class Family:
    """A family as the kernels see it.

    name: of its module; gru: as in `Variant`; state: the class of its states; arrays: the names of their arrays; own: returns
    the parameters of a unit besides matrices, as in cell.cuh, or None.
    """

    name: str
    gru: bool
    state: Callable[..., Any]
    arrays: tuple[str, ...]
    own: Callable[[Any], Tensor | None]

    @property
    def runs(self) -> tuple[str, ...]:
        """The variants of the family that the kernels run."""
        return (RESET_BEFORE,) if self.gru else (PEEPHOLES, PROJECTION)

    def variant(self, problem: Problem, *, gates_float32: bool = False) -> Variant:
        """Return the variant of the kernels that runs a problem."""
        two_products = RESET_BEFORE in problem.variants or PROJECTION in problem.variants
        return Variant(
            device_index(problem.device),
            torch.float16 if problem.tf32 else problem.storage,
            gates_float32 or problem.tf32,
            problem.hidden,
            self.gru,
            peepholes=PEEPHOLES in problem.variants,
            vector=(problem.vector or problem.hidden) if two_products else 0,
        )


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a call runs. packing: the layout of the weights."""

    packing: Packing | WidePacking | TwoProductsPacking
    copies_state: bool
    launches: Launches


class _Product(NamedTuple):
    """A recurrent product. packed, scale: as `_packed` returns them; width: units that the kernel computes from the sums."""

    packed: Tensor
    scale: Tensor | None
    width: int


class _Side(NamedTuple):
    """What a launch reads and writes for one direction or level. gates_apart: from one token's gate inputs to the next; arrays: as in
    `Call` of cell.cuh."""

    gates: Tensor
    gates_apart: int
    products: Sequence[_Product]
    arrays: Sequence[Tensor | None]
    forward: bool


@dataclass(frozen=True, slots=True)
class _SideBySide:
    """An array of the input products of both directions. second: the weights of the second direction."""

    second: Any
    array: Tensor

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (self.array,)


def backends(family: Family) -> tuple[Backend, ...]:
    """Return the backends of a family: `adaptive` and `persistent`, which choose among the others, and those by name."""
    no_room = "this device has no room"
    ways: tuple[tuple[str, FindShape, Refuses], ...] = (
        ("adaptive", adaptive_shape, _adaptive_refusal),
        ("persistent", fastest_shape, partial(_refusal, fastest_shape, (8, 0), no_room)),
        ("cluster", cluster_shape, partial(_refusal, cluster_shape, CLUSTERS, "no cluster of this device has room")),
        ("grid", grid_shape, partial(_refusal, grid_shape, (8, 0), no_room, halves=True)),
        ("wide", wide_shape, partial(_refusal, wide_shape, (9, 0), no_room, until=(10, 0), halves=True)),
    )
    return tuple(
        Backend(
            name,
            partial(encode, family, find_shape),
            partial(refuses, family),
            partial(_describe, family, find_shape) if name in ("adaptive", "persistent") else None,
            partial(encode_both, family, find_shape),
            partial(encode_levels, family) if name == "adaptive" else None,
            runs=family.runs,
            pinned=name != "adaptive",
        )
        for name, find_shape, refuses in ways
    )


def encode(family: Family, find_shape: FindShape, x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
    """Encode every row in one direction. Without slots, `last` and the new hidden state share their memory."""
    encoded = _encode(family, find_shape, x, (weights,), (state,), want)
    return replace(encoded, state=encoded.state[0])


def encode_both(family: Family, find_shape: FindShape, x: Ragged, weights: Any, states: Any, *, want: Outputs) -> Encoded:
    """Encode every row in both directions, as `kernels.directions.compose_directions` describes, in one launch if the device has room."""
    return _encode(family, find_shape, x, weights, states or (None, None), want)


def encode_levels(family: Family, x: Ragged, weights: Sequence[Any], states: Sequence[Any] | None, *, want: Outputs) -> Encoded:
    """Encode every row by levels in one direction, as `kernels.directions.compose_levels` describes. As many levels run at once as are
    faster that way."""
    before = [None] * len(weights) if states is None else states
    after: list[Any] = []
    while len(after) < len(weights):
        first = len(after)
        together = _levels_together(family, x, weights[first:])
        until = first + together
        level_want = want if until == len(weights) else Outputs(steps=True)
        run = partial(_encode_together, family) if together > 1 else partial(_encode, family, adaptive_shape)
        encoded = run(x, weights[first:until], before[first:until], level_want)
        after += encoded.state
        if encoded.steps is not None:
            x = Ragged(encoded.steps, x.offsets)
    return replace(encoded, state=tuple(after))


def _encode(
    family: Family, find_shape: FindShape, x: Ragged, weights: Sequence[Any], states: Sequence[Any], want: Outputs
) -> Encoded:
    """Run the input products and then the kernel, for one direction or for both."""
    gates = _gate_inputs(x, weights)
    like, rows, vector, directions = gates[0], x.rows, weights[0].vector, len(weights)
    after = tuple(_state_after(family, state, like, rows, weights[0]) for state in states)
    encoded = _outputs(like, rows, directions * vector, want, after, after[0] if directions == 1 else None)
    if not rows:
        return encoded
    variant = _variant(family, like, weights[0])
    plan = _plan(family.name, find_shape, variant, directions, rows)
    before = [state.by_row() if state is not None and plan.copies_state else state for state in states]
    outputs = _written(encoded)
    sides = [
        _Side(
            gates[side],
            gates[side].stride(0),
            _products(weights[side], plan.packing, variant.storage),
            _read_and_written(
                family,
                weights[side],
                before[side],
                after[side],
                [None if output is None else output[:, side * vector :] for output in outputs],
            ),
            forward=side == 0,
        )
        for side in range(directions)
    ]
    _run(plan.launches, sides, x.offsets.contiguous(), like, directions * vector)
    return encoded


def _encode_together(family: Family, x: Ragged, weights: Sequence[Any], states: Sequence[Any], want: Outputs) -> Encoded:
    """Run the input product of the first level and then all levels in one kernel."""
    (gates,) = _gate_inputs(x, weights[:1])
    rows, hidden, levels = x.rows, weights[0].hidden, len(weights)
    after = tuple(_state_after(family, state, gates, rows, weights[0]) for state in states)
    encoded = _outputs(gates, rows, hidden, want, after, after[-1])
    variant = _variant(family, gates, weights[0])
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
                    family, layer, states[level], after[level], _written(encoded) if layer is weights[-1] else nothing
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
            exchange = (
                like.new_zeros((len(numbers), launch.exchange_words), dtype=torch.int32) if launch.exchange_words else None
            )
            members: list[int] = []
            for place, number in enumerate(numbers):
                side = sides[number]
                for product in side.products:
                    exchanged = None if exchange is None else exchange[place]
                    own, *others = side.arrays
                    members += map(address, (side.gates, product.packed, product.scale, own, offsets, *others, exchanged))
                    members += (wide, first, until, product.width, launch.octets, launch.width, side.forward)
                    members += (side.gates_apart, width)
            launch.kernel.launch((launch.blocks * len(numbers), 1, 1), launch.shared, (*members, launch.blocks))


def _outputs(like: Tensor, rows: int, width: int, want: Outputs, after: tuple[Any, ...], only: Any) -> Encoded:
    """Return new arrays for the wanted outputs. only: the new state whose hidden values are the last output, if there is one such state;
    without slots, both share their memory."""
    shared = None if only is None or only.slots is not None else only.hidden
    return Encoded(
        state=after,
        steps=_new(like, len(like), width) if want.steps else None,
        last=(_new(like, rows, width) if shared is None else shared) if want.last else None,
        mean=_new(like, rows, width) if want.mean else None,
        max=_new(like, rows, width) if want.max else None,
    )


def _written(encoded: Encoded) -> tuple[Tensor | None, ...]:
    """Return the outputs that a kernel writes besides states: an output that is a new hidden state is none of them."""
    is_state = any(encoded.last is state.hidden for state in encoded.state)
    return encoded.steps, None if is_state else encoded.last, encoded.mean, encoded.max


def _read_and_written(
    family: Family, layer: Any, before: Any, after: Any, outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the arrays of `_Side`."""
    return (
        _own(family, layer),
        *_slots(before, after),
        *_arrays(family, before),
        *_arrays(family, after),
        *outputs,
    )


def _variant(family: Family, gates: Tensor, layer: Any) -> Variant:
    """Return the variant of the kernels that runs a layer from these gate inputs."""
    storage = layer.recurrent.dtype
    tf32 = allows_tf32(gates.device, storage)
    problem = Problem(gates.device, storage, layer.hidden, layer.variants, layer.vector, tf32=tf32)
    return family.variant(problem, gates_float32=gates.dtype == torch.float32)


@cache
def adaptive_shape(variant: Variant, rows: int, directions: int) -> PersistentShape | None:
    """Return the fastest shape of all kernels that runs on the device."""
    return _first_shape(variant, rows, directions, ADAPTIVE)


@cache
def fastest_shape(variant: Variant, rows: int, directions: int) -> PersistentShape | None:
    """Return the fastest shape of the kernels with the same order of sums that runs on the device."""
    return _first_shape(variant, rows, directions, PERSISTENT)


@cache
def cluster_shape(variant: Variant, rows: int, directions: int) -> PersistentShape | None:
    """Return the fastest shape of the cluster kernel that runs on the device."""
    return _first_shape(variant, rows, directions, CLUSTER)


@cache
def grid_shape(variant: Variant, rows: int, directions: int) -> PersistentShape | None:
    """Return the fastest shape of the grid kernel that runs on the device."""
    return _first_shape(variant, rows, directions, GRID)


@cache
def wide_shape(variant: Variant, rows: int, directions: int) -> PersistentShape | None:
    """Return the fastest shape of the wide kernel that runs on the device."""
    return _first_shape(variant, rows, directions, WIDE)


@cache
def levels_shape(variant: Variant, rows: int, levels: int) -> WideShape | None:
    """Return the shape in which this many levels run at once, or None if they run faster one after the other or the device has no room."""
    sizes = matching_shapes(_tuned(variant)["levels"], (APART, *WIDE), hidden=variant.hidden, rows=rows, levels=levels)
    kind, size = next(sizes, (APART, 0))
    if kind == APART or variant.vector:
        return None
    shape = WideShape(variant, size, levels)
    return shape if shape.runs() else None


KINDS: Mapping[FindShape, Kinds] = {
    adaptive_shape: ADAPTIVE,
    fastest_shape: PERSISTENT,
    cluster_shape: CLUSTER,
    grid_shape: GRID,
    wide_shape: WIDE,
}
"""The kinds of shapes among which each function looks."""


def _refusal(
    find_shape: FindShape,
    needed: Capability,
    no_room: str,
    family: Family,
    problem: Problem,
    *,
    until: Capability | None = None,
    halves: bool = False,
) -> str | None:
    """Return why a kernel cannot run a problem, or None. The other arguments are as in `device_refusal`."""
    variant = family.variant(problem)
    needed = CLUSTERS if variant.terms > 1 else needed
    refusal = device_refusal(problem, needed, until=until, halves=(halves or variant.vector > 0) and not problem.tf32)
    if refusal is None and find_shape(variant, 1, 1) is None:
        units = "hidden units in float32" if variant.terms > 1 else "hidden units"
        largest = _most_units(variant, find_shape)
        refusal = f"{no_room} for {problem.hidden} {units}" + (f", at most for {largest}" if largest else "")
    return refusal


def _adaptive_refusal(family: Family, problem: Problem) -> str | None:
    """Return why the wide kernel should be chosen neither for many rows nor for several levels, or None."""
    refusal = device_refusal(problem, (9, 0), until=(10, 0), halves=not problem.tf32)
    variant = family.variant(problem)
    together = any(levels_shape(variant, MANY, levels) for levels in range(2, problem.levels + 1)) if refusal is None else False
    if refusal is None and not together and not isinstance(adaptive_shape(variant, MANY, 1), WideShape):
        refusal = f"no other kernel runs many rows of {problem.hidden} hidden units faster"
    return refusal


def _describe(family: Family, find_shape: FindShape, problem: Problem) -> str:
    """Return which kernel runs for which numbers of rows."""
    variant = family.variant(problem)
    bounds = sorted({shape["rows"] for shape in _tuned_shapes(variant) if "rows" in shape})
    shapes = [(find_shape(variant, rows, 1), f" up to {rows} rows") for rows in bounds]
    shapes.append((find_shape(variant, MANY, 1), ""))
    changes = [(shape, bound) for n, (shape, bound) in enumerate(shapes) if n + 1 == len(shapes) or shape != shapes[n + 1][0]]
    steps = "two products a step: " if variant.vector else ""
    return steps + ", ".join(f"{shape}{bound}" for shape, bound in changes)


def _first_shape(variant: Variant, rows: int, directions: int, kinds: Kinds) -> PersistentShape | None:
    shapes = _candidates(variant, rows, directions, kinds)
    fastest = next((shape for shape in shapes if shape.runs()), None)
    if fastest is None or torch.cuda.get_device_name(variant.device) == _tuned(variant)["device"]:
        return fastest
    # The order was measured on another device. Where that has more room, its fastest shape may need many more launches here.
    others = [shape for shape in shapes if type(shape) is type(fastest) and shape.has_room()]
    fewest = min(others, key=lambda shape: _launches(shape, rows, directions))
    return fewest if fewest.runs() else fastest


def _candidates(variant: Variant, rows: int, directions: int, kinds: Kinds) -> list[PersistentShape]:
    """Return the shapes of the file for this device, the fastest first, whether it has room for them or not."""
    if variant.vector:
        kinds = {kind: TWO_PRODUCTS[kind] for kind in kinds if kind in TWO_PRODUCTS}
    sizes = matching_shapes(_tuned_shapes(variant), tuple(kinds), hidden=variant.hidden, rows=rows, directions=directions)
    return [kinds[kind](variant, size) for kind, size in sizes]


def _levels_together(family: Family, x: Ragged, weights: Sequence[Any]) -> int:
    """Return how many of these levels, from the first, run at once."""
    first = weights[0]
    if not x.rows or any(layer.hidden != first.hidden or layer.variants != first.variants for layer in weights[1:]):
        return 1
    float32 = first.input is None and first.table is None and x.data.dtype == torch.float32
    like = x.data.new_empty(0, dtype=torch.float32 if float32 else first.recurrent.dtype)
    variant = _variant(family, like, first)
    return next((levels for levels in range(len(weights), 1, -1) if levels_shape(variant, x.rows, levels)), 1)


def _launches(shape: PersistentShape, rows: int, directions: int) -> int:
    """Return how many launches of a shape run the rows of all directions."""
    together = directions if shape.runs_both else 1
    return directions // together * ceil_div(ceil_div(rows, directions), shape.max_rows(together))


def _most_units(variant: Variant, find_shape: FindShape) -> int:
    """Return the most hidden units that have room by the sizes alone, out of fewer than the variant has; 0 if there are none."""
    smaller = (variant.of_size(hidden) for hidden in range(variant.hidden - 1, 0, -1))
    kinds = KINDS[find_shape]
    return next((other.hidden for other in smaller if any(shape.has_room() for shape in _candidates(other, 1, 1, kinds))), 0)


def _tuned(variant: Variant) -> Mapping[str, Any]:
    return load_tuned(HERE / "tuned", torch.cuda.get_device_name(variant.device))


def _tuned_shapes(variant: Variant) -> Sequence[Mapping[str, int]]:
    tuned = _tuned(variant)
    name = "float32" if variant.terms > 1 else "gru" if variant.gru else "lstm"
    shapes: Sequence[Mapping[str, int]] = tuned[f"{name}, two products" if variant.vector else name]
    return shapes


@cache
def _plan(name: str, find_shape: FindShape, variant: Variant, directions: int, rows: int) -> LaunchPlan:
    """Return the launches of a call: one, unless there are too many rows for it or both directions cannot run at once."""
    shape = find_shape(variant, directions * rows, directions)
    if shape is None:
        raise ContractError(
            f"this device has no room for {variant.hidden} hidden units of a layer {name!r}: choose another backend"
        )
    together = directions == 1 or shape.runs_both
    launches: list[tuple[tuple[int, ...], int, int, Launch]] = []
    for sides in (tuple(range(directions)),) if together else ((0,), (1,)):
        most = shape.max_rows(len(sides))
        bounds = [(first, min(rows, first + most)) for first in range(0, rows, most)]
        launches += [(sides, first, until, shape.launch(until - first, len(sides))) for first, until in bounds]
    return LaunchPlan(shape.packing, shape.copies_state, tuple(launches))


def _gate_inputs(x: Ragged, weights: Sequence[Any]) -> list[Tensor]:
    """Return the gate inputs of each direction, (tokens, 4 or 3 x hidden), in the dtype of the weights or in float32."""
    storage = weights[0].recurrent.dtype
    if weights[0].table is not None:
        return [_aligned(embed(x.data, layer.table, layer.table.dtype)) for layer in weights]
    if weights[0].input is None:
        return [_aligned(as_gate_dtype(x.data, storage))] * len(weights)
    data = x.data if x.data.dtype == storage else x.data.to(storage)
    gates = torch.addmm(_side_by_side(weights, "bias"), data, _side_by_side(weights, "input"))
    return list(_aligned(gates).chunk(len(weights), dim=1))


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


def _products(layer: Any, packing: Packing | WidePacking | TwoProductsPacking, storage: torch.dtype) -> Sequence[_Product]:
    """Return the recurrent products of a step in their order. storage: the dtype in which the kernel holds the weights."""
    if isinstance(packing, TwoProductsPacking):
        first, second = (_held(layer, (packing, number), storage, partial(packing.pack, layer, number)) for number in range(2))
        return _Product(first, None, layer.hidden), _Product(second, None, layer.vector)
    return (_Product(*_packed(layer, packing, storage), layer.hidden),)


def _with_inputs(layer: Any, packing: WidePacking, storage: torch.dtype) -> _Product:
    """Return the product of the inputs and the hidden vector of a level above the first."""
    packed = _held(layer, (packing, "inputs"), storage, lambda: packing.pack_with_inputs(layer.input, layer.recurrent))
    return _Product(packed, None, layer.hidden)


def _bias(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the gate inputs of every token in a level above the first."""
    return pack_once(layer.packed, ("bias", dtype), lambda: _aligned(layer.bias.to(dtype)[None]))


def _packed(layer: Any, packing: Packing | WidePacking, storage: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the recurrent weights as the kernels read them, and the scale of float32 weights, which have two terms."""
    recurrent = layer.recurrent
    if storage != torch.float32:
        return _held(layer, packing, storage, lambda: packing.pack(recurrent)), None
    assert isinstance(packing, Packing), "no other shape runs weights of two terms"
    scale = pack_once(layer.packed, "scale", lambda: scale_of(recurrent))
    return pack_once(layer.packed, packing, lambda: packing.pack_terms(recurrent, scale)), scale


def _held(layer: Any, name: Any, storage: torch.dtype, pack: Callable[[], Tensor]) -> Tensor:
    """Return packed weights in another dtype than the layer's where TF32 is allowed. Weights beyond its numbers saturate."""
    if storage == layer.recurrent.dtype:
        return pack_once(layer.packed, name, pack)
    largest = torch.finfo(storage).max
    return pack_once(layer.packed, (name, storage), lambda: pack().clamp(-largest, largest).to(storage))


def _own(family: Family, layer: Any) -> Tensor | None:
    """Return the parameters of a unit besides matrices, as the kernels read them, or None."""
    own = family.own(layer)
    return None if own is None else pack_once(layer.packed, "own", lambda: _as_float32(own))


def _state_after(family: Family, state: Any, like: Tensor, rows: int, layer: Any) -> Any:
    """Return the state after the call: new arrays, or the same state caches; raises ContractError if a kernel cannot write to them."""
    if state is None or state.slots is None:
        return family.state(*(_new(like, rows, layer.vector if name == "hidden" else layer.hidden) for name in family.arrays))
    for name in family.arrays:
        check_state_cache(name, getattr(state, name))
    return without_sources(state)


def _slots(before: Any, after: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the slots from which the rows start, and the slots that they write. before: a copy by row has no slots."""
    written = None if after.slots is None else as_int32(after.slots)
    return None if before is None or before.slots is None else row_sources(written, before.sources), written


def _arrays(family: Family, state: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the hidden states and the cells, as far as there are any."""
    if state is None:
        return None, None
    arrays = [_as_float32(getattr(state, name)) for name in family.arrays]
    return arrays[0], arrays[1] if len(arrays) > 1 else None


def _as_float32(values: Tensor) -> Tensor:
    """Return contiguous float32 values: the array itself for a state cache, which `check_state_cache` has accepted."""
    return values.float().contiguous()


def _new(like: Tensor, *sizes: int) -> Tensor:
    return like.new_empty(sizes, dtype=torch.float32)
