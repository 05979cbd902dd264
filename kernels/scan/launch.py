"""The CUDA kernels of the SRU and the QRNN: the shape in which each takes a problem, the weights as they want them, and the launch.

`product.cu` makes a layer of its inputs in one launch, `given.cu` one of gates that are given or gathered from tables. Both run both
directions at once. Sums and cells are float32. Nothing waits for the device, and a call may be captured in a CUDA graph: offsets, ids,
places and values are read when the graph runs. Families bring what a layer is made of; nothing here knows their weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backend import Problem
from kernels.compile import Kernel, compiled, shared_limit
from kernels.contract import ContractError, Encoded, Outputs, Ragged
from kernels.launching import (
    address,
    as_lines,
    check_slab,
    current,
    index_of,
    kept,
    parts_of,
    processors,
    refused_by_device,
    round_up,
)
from kernels.tensormap import MAP_BYTES, mapped
from kernels.tuning import covering, tuned

HERE = Path(__file__).parent
MOST_TOKENS = 2**31 - 2**16
"""Of one call: places are counted in 32 bits."""
TILE = 64
"""Steps that are computed at once."""
RUN, LONG_RUN = 16, 32
"""Steps that a thread goes through before it hands its cell over: more where it has registers for them."""
DEPTH = 64
"""Columns of the inputs that are multiplied at once."""
ALIGNED = 1024
"""Bytes to which the tensor cores' operands are aligned in shared memory."""
STAGES = range(8, 0, -1)
"""How many pieces or tiles a block may have on their way."""
PATCHING_WARPS = 3
"""Of a product, each of which needs a stage."""
LONG_ROW = 384
"""Steps of a row that is worth a ring."""
FEW_ROWS = 8
"""Rows with which a product of long rows has too few blocks."""
NARROW = 256
"""Hidden units of all directions up to which a ring is faster than that, and than none."""
RINGS = (8, 4)
"""Blocks of a cluster."""
IN_CLUSTERS = 120
"""Blocks that run at once in clusters, of which the multiprocessors of a device hold no whole number."""
MOST_COLUMNS = 192
"""Of a tile."""
FEW_UNITS = 32
"""Hidden units of a block of a ring, and where the gates are given."""
NO_SKIP, SKIP_BLOCK, SKIP_COLUMNS = range(3)


class Form(NamedTuple):
    """What a layer computes, whatever its size: gate blocks, an SRU or a QRNN, whether gates see the cell, the skip, tanh of the cell."""

    blocks: int
    sru: bool = False
    own_cell: bool = False
    skip: int = NO_SKIP
    tanh: bool = False


class Gates(NamedTuple):
    """Where the gates come from. window: steps that a product or a sum of tables sees; gather: through ids; product: of the inputs."""

    product: bool
    window: int
    gather: bool = False
    float32: bool = False
    piece_bytes: int = 16


class Layer(NamedTuple):
    """What a kernel is specialised by, whatever its shape; watched: more than the last step leaves the device."""

    device: int
    storage: torch.dtype
    form: Form
    gates: Gates
    directions: int
    hidden: int
    inputs: int
    skip_float32: bool
    watched: bool


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction's arrays. source: gates or tables, or data: (tokens, inputs) with the weights of a product, (window x inputs,
    blocks x hidden), and what is kept of them; bias: (blocks x hidden) and own_cell (2 x hidden) float32; left: what stands before each
    row, and left_after: where that of its next chunk goes; before: the cells that it goes on from, with slots a slab that takes the new
    ones in these places; slots_before: the places that rows go on from, where they are others; skip_from, scale: of a skip that is
    columns."""

    bias: Tensor
    source: Tensor | None = None
    data: Tensor | None = None
    weights: Tensor | None = None
    packed: dict[Any, Tensor] = field(default_factory=dict)
    own_cell: Tensor | None = None
    left: Tensor | None = None
    left_after: Tensor | None = None
    before: Tensor | None = None
    slots: Tensor | None = None
    slots_before: Tensor | None = None
    skip_from: int = 0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """units: hidden units of a block; ring: blocks of a cluster whose teams form a ring, or 0 where each team has rows of its own; busy:
    gates come faster than four threads a unit prepare them."""

    units: int
    ring: int = 0
    busy: bool = False

    @property
    def groups(self) -> int:
        """Threads of a team for each unit."""
        if self.busy:
            return 6
        return 4 if self.units <= 32 else 1

    @property
    def buffers(self) -> int:
        """Tiles of a product that a team may have before it."""
        return 2 if self.units <= 32 and not self.ring else 1

    @property
    def team(self) -> int:
        """Threads."""
        return self.groups * self.units

    @property
    def cluster(self) -> int:
        return max(1, self.ring)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and its grid. slices: of the hidden units, a block has one; streams: of whole rows, each gone through by a team, or by a
    ring of them."""

    kernel: Kernel
    blocks: tuple[int, int, int]
    shared: int
    streams: int
    slices: int


def encode(
    form: Form,
    gates: Gates,
    x: Ragged,
    directions: Sequence[Direction],
    want: Outputs,
    *,
    hidden: int,
    storage: torch.dtype,
    ids: Tensor | None = None,
    skip: Tensor | None = None,
) -> tuple[Encoded, list[Tensor]]:
    """One launch. Returns what comes out, whose state is None, and the cells after, by direction."""
    device, rows, tokens, width = x.offsets.device, x.rows, len(x.data), hidden * len(directions)
    if tokens > MOST_TOKENS:
        raise ContractError(f"x has {tokens} tokens, at most {MOST_TOKENS} are taken at once")

    def new(wanted: bool, count: int) -> Tensor | None:
        return torch.empty((count, width), dtype=torch.float32, device=device) if wanted else None

    encoded = Encoded(None, new(want.steps, tokens), new(want.last, rows), new(want.mean, rows), new(want.max, rows))
    after = [_after(one, rows, hidden, device) for one in directions]
    if not rows:
        return encoded, after
    pooled, data = want.mean or want.max, directions[0].data
    layer = Layer(
        index_of(device),
        storage,
        form,
        gates,
        len(directions),
        hidden,
        inputs=0 if data is None else data.shape[1],
        skip_float32=skip is not None and skip.dtype == torch.float32,
        watched=want.steps or pooled,
    )
    shape = shape_for(layer, rows, tokens, pooled)
    launch = _launch(layer, shape, rows)
    # A kernel asks for its weights before it waits for what packs them.
    early = all(_is_packed(one, shape.units) for one in directions)
    pairs = _pairs(layer, shape, directions, after)
    single = (x.offsets.contiguous(), ids, skip, encoded.steps, encoded.last, encoded.mean, encoded.max)
    sizes = (
        single[0].dtype == torch.int64,
        ids is not None and ids.dtype == torch.int64,
        rows,
        hidden,
        width,
        layer.inputs,
        pairs.source[0].shape[-2] if gates.gather else 0,
        0 if skip is None else skip.stride(0),
        launch.streams,
        launch.slices,
    )
    skips = [one.skip_from for one in directions], [_bits(one.scale) for one in directions]
    addresses = [[address(one) for one in pair] for pair in pairs]
    members = [number for pair in (*addresses, *skips) for number in (pair[0], pair[-1])]
    others = [_map(directions[0].data) + _map(directions[-1].data)] if gates.product else []
    with current(device):
        launch.kernel.launch(launch.blocks, launch.shared, [*members, *map(address, single), *sizes], *others, early=early)
    return encoded, after


class _Pairs(NamedTuple):
    """The arrays of each direction, in the order of struct Call in scan.cuh; alive until they are launched."""

    data: Sequence[Tensor | None]
    source: Sequence[Tensor]
    bias: Sequence[Tensor]
    own_cell: Sequence[Tensor | None]
    left: Sequence[Tensor | None]
    left_after: Sequence[Tensor | None]
    before: Sequence[Tensor | None]
    after: Sequence[Tensor]
    slots_before: Sequence[Tensor | None]
    slots_after: Sequence[Tensor | None]


def _pairs(layer: Layer, shape: Shape, directions: Sequence[Direction], after: Sequence[Tensor]) -> _Pairs:
    before = [_before(one, copied=shape.ring > 0) for one in directions]
    slots = [None if one.slots is None else as_lines(one.slots) for one in directions]
    return _Pairs(
        [one.data for one in directions],
        [_source(one, layer.form.blocks, layer.gates.window, shape.units) for one in directions],
        [one.bias for one in directions],
        [one.own_cell for one in directions],
        [one.left for one in directions],
        [one.left_after for one in directions],
        before,
        after,
        slots_before=[None if shape.ring else _lines_before(one, slot) for one, slot in zip(directions, slots, strict=True)],
        slots_after=slots,
    )


def product(window: int) -> Gates:
    """Gates that are a product of the inputs."""
    return Gates(product=True, window=window)


def given(arrays: Sequence[Tensor], hidden: int, *, window: int = 1, gather: bool = False) -> Gates:
    """Gates that are in these arrays, one a direction: as they are, or gathered from them as tables."""
    size = arrays[0].element_size()
    together = math.gcd(hidden * size, *(array.data_ptr() for array in arrays), 16)
    return Gates(False, window, gather, arrays[0].dtype == torch.float32, together)


def refused(problem: Problem) -> str | None:
    """What `explain` shows where the kernels cannot run."""
    return refused_by_device(problem, (9, 0), until=(10, 0))


def pack(weights: Tensor, blocks: int, units: int) -> Tensor:
    """(window, inputs, blocks x hidden) as the right operands of the tensor cores' products, padded with zeros.

    (slices of `units` hidden units, steps of the window by 64 inputs, columns block by block, 64 inputs): the 16-byte pieces of the row
    of column n are swizzled, piece p stands in place p ^ n % 8.
    """
    window, inputs, columns = weights.shape
    hidden = columns // blocks
    slices, depth = parts_of(hidden, units), parts_of(inputs, DEPTH)
    padded = weights.new_zeros(window, depth * DEPTH, blocks, slices * units)
    padded[:, :inputs, :, :hidden] = weights.view(window, inputs, blocks, hidden)
    split = padded.view(window, depth, 8, 8, blocks, slices, units)
    tap, chunk, piece, value, block, part, unit = range(7)
    rows = split.permute(part, tap, chunk, block, unit, piece, value).reshape(slices, window * depth, blocks * units, 8, 8)
    column = torch.arange(blocks * units, device=weights.device)[:, None]
    return rows[:, :, column, torch.arange(8, device=weights.device) ^ column % 8].contiguous()


def apart(form: Form, width: int, rows: int, tokens: int) -> bool:
    """Whether the product is left to the library. Where few rows are long, the blocks that multiply would wait for each other's cells.

    width: hidden units of all directions.
    """
    return rows <= FEW_ROWS and tokens >= LONG_ROW * rows and (form.own_cell or width > NARROW)


def shape_for(layer: Layer, rows: int, tokens: int, pooled: bool) -> Shape:
    """As many units as was measured to be fastest; a ring where few rows are long, but pools are added up in the order of the steps."""
    width, own_cell = layer.hidden * layer.directions, layer.form.own_cell
    if not own_cell and not pooled and tokens >= LONG_ROW * rows and width <= NARROW:
        blocks = parts_of(layer.hidden, FEW_UNITS) * layer.directions * rows
        ring = next((ring for ring in RINGS if ring * blocks <= IN_CLUSTERS), 0)
        if ring:
            return Shape(FEW_UNITS, ring)
    if not layer.gates.product:
        return Shape(FEW_UNITS, busy=not own_cell and rows > FEW_ROWS)
    # What leaves with every step is computed by the teams, and blocks of few units have more threads for it.
    if layer.watched:
        return Shape(FEW_UNITS)
    fastest = next(_units(layer.device, width=width, depth=layer.gates.window * layer.inputs, rows=rows, tokens=tokens))
    return Shape(fastest if fastest * layer.form.blocks <= MOST_COLUMNS else FEW_UNITS)


def _units(device: int, **sizes: int) -> Iterator[int]:
    shapes = tuned(HERE / "tuned", torch.cuda.get_device_name(device))["shapes"]
    return (units for _, units in covering(shapes, ("units",), **sizes))


@cache
def _launch(layer: Layer, shape: Shape, rows: int) -> Launch:
    """The kernel and its grid. A block is alone on its multiprocessor; it has two streams, or two places of a ring."""
    kernel, shared = _kernel(layer, shape)
    slices = parts_of(layer.hidden, shape.units)
    room = max(1, processors(layer.device) // (slices * layer.directions * shape.cluster))
    streams = min(rows, room if shape.ring else 2 * room)
    places = streams if shape.ring else parts_of(streams, 2)
    return Launch(kernel, (places * shape.cluster, slices, layer.directions), shared, streams, slices)


@cache
def _kernel(layer: Layer, shape: Shape) -> tuple[Kernel, int]:
    form, gates = layer.form, layer.gates
    constants = {
        "SRU": form.sru,
        "BLOCKS": form.blocks,
        "OWN_CELL": form.own_cell,
        "SKIP": form.skip,
        "TANH": form.tanh,
        "BFLOAT16": layer.storage == torch.bfloat16,
        "SKIP_FLOAT32": layer.skip_float32,
        "UNITS": shape.units,
        "GROUPS": shape.groups,
        "RUN": LONG_RUN if not gates.product and not shape.ring else RUN,
        "RING": shape.ring > 0,
        "CTAS": shape.cluster,
    }
    if gates.product:
        pieces = gates.window * parts_of(layer.inputs, DEPTH)
        resident = _product_stages(layer, shape, pieces, resident=True) > 0
        stages = _product_stages(layer, shape, pieces, resident=resident)
        shared = _product_bytes(layer, shape, pieces, stages, resident=resident)
        constants |= {"WINDOW": gates.window, "BUFFERS": shape.buffers, "PIECES": pieces, "RESIDENT": resident}
        threads = 384 + 2 * shape.team
    else:
        stages = next((count for count in STAGES if _given_bytes(layer, shape, count) <= shared_limit(layer.device)), 0)
        shared = _given_bytes(layer, shape, stages)
        constants |= {
            "TAPS": gates.window,
            "GATHER": gates.gather,
            "FIRST_LINE": gates.gather and not form.sru,
            "GATES_FLOAT32": gates.float32,
            "PIECE_BYTES": gates.piece_bytes,
            "ALL_BLOCKS": _all_blocks(layer),
            "EXACT": layer.storage == torch.float32,
        }
        threads = 128 + 2 * shape.team
    if not stages:
        raise ContractError(f"this device has no room for a window of {gates.window} steps")
    kernel = compiled(
        HERE / ("product.cu" if gates.product else "given.cu"),
        layer.device,
        threads=threads,
        cluster=shape.cluster,
        STAGES=stages,
        SHARED=shared,
        **{name: int(value) for name, value in constants.items()},
    )
    return kernel, shared


def _share_bytes(shape: Shape) -> int:
    """Of both teams, and what else a block has once."""
    ring = shape.units * (16 + 16 * shape.groups + 32 * shape.cluster) + 96 if shape.ring else 0
    return 2 * (12 * shape.units + ring + 128) + 256


def _product_bytes(layer: Layer, shape: Shape, pieces: int, stages: int, *, resident: bool) -> int:
    """Of shared memory, when all weights stay there or come with each stage."""
    columns = layer.form.blocks * shape.units
    gates = shape.buffers * 2 * TILE * (2 * columns + 16)
    weights = (pieces if resident else stages) * columns * 2 * DEPTH
    return round_up(_share_bytes(shape) + gates + weights + stages * (2 * TILE * 2 * DEPTH + 24) + 8, ALIGNED)


def _product_stages(layer: Layer, shape: Shape, pieces: int, *, resident: bool) -> int:
    """As many as there is room for, or 0 where there is too little."""
    limit = shared_limit(layer.device)
    fitting = (count for count in STAGES if _product_bytes(layer, shape, pieces, count, resident=resident) <= limit)
    found = next(fitting, 0)
    return found if found >= PATCHING_WARPS else 0


def _given_bytes(layer: Layer, shape: Shape, stages: int) -> int:
    slots = layer.form.blocks if _all_blocks(layer) else _needed(layer.form)
    summed = layer.gates.float32 or layer.gates.window > 1
    step = slots * shape.units * (4 if summed else 2) + 16
    return round_up(_share_bytes(shape) + 4 * 8 * TILE * layer.gates.window + stages * (2 * TILE * step + 32), ALIGNED)


def _all_blocks(layer: Layer) -> bool:
    """Whether tiles have what only hidden values need."""
    return layer.watched or layer.gates.window > 1


def _needed(form: Form) -> int:
    """Blocks that the cell needs."""
    return 3 if form.blocks == 4 and not form.sru else 2


def _after(direction: Direction, rows: int, hidden: int, device: torch.device) -> Tensor:
    """Where the new cells go; raises ContractError when a kernel cannot write there."""
    if direction.slots is None or direction.before is None:
        return torch.empty((rows, hidden), dtype=torch.float32, device=device)
    check_slab("cell", direction.before)
    return direction.before


def _before(direction: Direction, copied: bool) -> Tensor | None:
    """The cells before; copied out of their places where blocks may look at them after others have written the new ones."""
    if direction.before is None:
        return None
    if direction.slots is None:
        return direction.before.float().contiguous()
    if not copied:
        return direction.before
    places = direction.slots if direction.slots_before is None else direction.slots_before
    return direction.before[places.long()]


def _lines_before(direction: Direction, slots: Tensor | None) -> Tensor | None:
    """The places that rows go on from, as kernels read them; slots: those where their new cells go, which most often are the same."""
    return slots if direction.slots_before is None else as_lines(direction.slots_before)


def _source(direction: Direction, blocks: int, window: int, units: int) -> Tensor:
    weights = direction.weights
    if direction.source is not None:
        return direction.source
    assert weights is not None
    return kept(direction.packed, _packing(units), lambda: pack(weights.view(window, -1, weights.shape[-1]), blocks, units))


def _is_packed(direction: Direction, units: int) -> bool:
    return direction.weights is None or _packing(units) in direction.packed


def _packing(units: int) -> tuple[str, int]:
    return "input", units


def _map(data: Tensor | None) -> bytes:
    """Of the inputs; where there are none, nothing is fetched."""
    if data is None or not data.numel():
        return bytes(MAP_BYTES)
    return mapped(data.data_ptr(), len(data), data.shape[1], TILE, DEPTH)


def _bits(value: float) -> int:
    bits: int = Struct("q").unpack(Struct("d").pack(value))[0]
    return bits
