"""The LSTM's CUDA kernels: the shape in which each takes a problem, the weights as it wants them, and its launch.

`cluster` runs a layer that fits a cluster of thread blocks (cluster.cu), `grid` one that fits the whole device (grid.cu), and
`persistent` the faster of the two. Both hold their recurrent weights in registers and shared memory for all steps, in float16 or
bfloat16; sums and cells are float32. Nothing waits for the device, and a call may be captured in a CUDA graph: offsets, places and
values are read when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kernels.backend import Problem
from kernels.compile import Kernel, compiled, lends_registers, registers, resident_clusters, shared_limit
from kernels.contract import ContractError, Encoded, LSTMState, LSTMWeights, Outputs, Ragged
from kernels.launching import (
    Capability,
    as_lines,
    check_slab,
    current,
    in_either,
    index_of,
    parts_of,
    refused_by_device,
    round_up,
)
from kernels.slots import moved_on
from kernels.tuning import covering, tuned

HERE = Path(__file__).parent
OCTET = 8
"""Rows that the tensor cores multiply at once."""
SORTED = 512
"""Rows among which a tile takes those of like length."""
OCTETS = (1, 2, 3, 5)
"""Octets of a cluster's tile, each a kernel of its own."""
LIKE_A_CLUSTER = 512
"""Hidden units up to which both kernels sum in the same order, so that the number of rows may decide between them."""
OWNERS_REGISTERS = 72
"""Of a thread of the grid kernel that owns a cell, where registers are lent."""
ROW_BYTES, PIECE_BYTES, PRODUCT_BYTES = 16, 16, 512


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and the grid for so many rows. A tile is what a cluster or team takes: `octets` octets of `width` rows each."""

    kernel: Kernel
    blocks: int
    shared: int
    octets: int
    width: int
    exchange_words: int = 0


class Layer(NamedTuple):
    """What a kernel is specialised by, whatever its shape; gates_float32: gate inputs are float32, and not as the weights are."""

    device: int
    bfloat16: bool
    gates_float32: bool
    hidden: int

    def compiled(self, source: str, *, threads: int, cluster: int = 1, cooperative: bool = False, **constants: int) -> Kernel:
        return compiled(
            HERE / source,
            self.device,
            threads=threads,
            cluster=cluster,
            cooperative=cooperative,
            SORTED=SORTED,
            BFLOAT16=int(self.bfloat16),
            GATES_FLOAT32=int(self.gates_float32),
            **constants,
        )


@dataclass(frozen=True)
class ClusterShape:
    """cluster.cu: `blocks` blocks in a cluster."""

    def __str__(self) -> str:
        return f"clusters of {self.blocks} blocks"

    copies_state: ClassVar[bool] = False
    """A state in slots is overwritten by no block before every other has read it."""
    layer: Layer
    blocks: int

    @property
    def padded(self) -> int:
        """Hidden units of all blocks: whole groups in each, whole chunks in both halves. The same for any number of blocks, so that
        a row's sums are."""
        return round_up(self.layer.hidden, 64 if self.layer.hidden <= 128 else 128)

    @property
    def units(self) -> int:
        return self.padded // self.blocks

    @property
    def groups(self) -> int:
        """Of eight hidden units, as `pack` lays them out."""
        return self.padded // 8

    @property
    def chunks(self) -> int:
        """Of 32 hidden units, as `pack` lays them out."""
        return self.padded // 32

    @property
    def threads(self) -> int:
        return 8 * self.units

    @property
    def most_rows(self) -> int:
        """Of one launch: as many as can be, since clusters wait for their turn."""
        return 1 << 30

    def fits(self, octets: int) -> bool:
        if self.units % 8 or self.threads > 1024 or self._held(octets) < 1:
            return False
        return self.shared(octets) <= shared_limit(self.layer.device)

    def shared(self, octets: int) -> int:
        """sizeof(Memory)."""
        warps = self.threads // 32
        spilled = max(1, self.padded // 16 - self._held(octets)) * warps * PRODUCT_BYTES
        buffers, halves = 2 * self.padded * PIECE_BYTES, warps * PRODUCT_BYTES
        outgoing, cells, rows, barriers = 8 * (self.units + 8) * 2, 12 * self.threads, 8 * ROW_BYTES, 16
        return round_up(spilled + octets * (buffers + halves + outgoing + cells + rows + barriers) + 4 * SORTED, 16)

    def kernel(self, octets: int) -> Kernel:
        return self.layer.compiled(
            "cluster.cu",
            threads=self.threads,
            cluster=self.blocks,
            CTAS=self.blocks,
            UNITS=self.units,
            OCTETS=octets,
            HELD=self._held(octets),
            SHARED=self.shared(octets),
        )

    def resident(self) -> int:
        """Clusters that run at once, one block on a multiprocessor."""
        return resident_clusters(self.kernel(1), max(self.shared(1), shared_limit(self.layer.device) // 2 + 1))

    def launch(self, rows: int) -> Launch:
        """Rows are spread over the clusters that can run at once; the fewer a cluster has, the less it must exchange."""
        rows_each = parts_of(rows, self.resident())
        ladder = [octets for octets in OCTETS if self.fits(octets)]
        octets = next((one for one in ladder if one * OCTET >= rows_each), ladder[-1])
        width = min(OCTET, parts_of(rows_each, octets))
        blocks = parts_of(rows, octets * width) * self.blocks
        return Launch(self.kernel(octets), blocks, self.shared(octets), octets, width)

    def _held(self, octets: int) -> int:
        """Products in a warp's registers: all, or as many as leave room for everything else."""
        return min(self.padded // 16, (registers(self.threads) - 60 - 8 * octets) // 4)


@dataclass(frozen=True)
class GridShape:
    """grid.cu: `units` hidden units in a block."""

    def __str__(self) -> str:
        return f"the grid by {self.units} units"

    copies_state: ClassVar[bool] = True
    """A block may have ended, and overwritten the state in its slots, when another begins."""
    layer: Layer
    units: int

    @property
    def parts(self) -> int:
        """Warps that multiply, each its part of the hidden vector: the quarters that a cluster sums, or eighths."""
        return 4 if self.layer.hidden <= LIKE_A_CLUSTER else 8

    @property
    def together(self) -> int:
        """Blocks that a multiprocessor runs at once."""
        return 8 // self.parts

    @property
    def members(self) -> int:
        """Blocks of a team, which has the whole layer."""
        return parts_of(self.layer.hidden, self.units)

    @property
    def groups(self) -> int:
        return self.members * self.units // 8

    @property
    def chunks(self) -> int:
        return parts_of(self.layer.hidden, 32 * self.parts) * self.parts

    @property
    def teams(self) -> int:
        """That run at once."""
        processors = int(torch.cuda.get_device_properties(self.layer.device).multi_processor_count)
        return processors * self.together // self.members

    @property
    def lends(self) -> bool:
        """Whether the warps that own cells leave most of their registers to those that multiply."""
        return self.units > OCTET and lends_registers(self.layer.device)

    @property
    def threads(self) -> int:
        """A warp for each part, and two for each eight units; in fours where registers are lent."""
        threads = 32 * self.parts + 8 * self.units
        return round_up(threads, 128) if self.lends else threads

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        if not self.lends:
            return registers(self.threads * self.together)
        multiply = 32 * self.parts
        return (65536 // self.together - (self.threads - multiply) * OWNERS_REGISTERS) // multiply // 8 * 8

    @property
    def most_rows(self) -> int:
        """Of one launch: what all teams together have room for."""
        return self.teams * OCTET * next(octets for octets in range(SORTED // OCTET, 0, -1) if self.has_room(octets))

    def fits(self) -> bool:
        return self.teams > 0 and self.has_room(1)

    def has_room(self, octets: int) -> bool:
        """In shared memory, when registers take a few values more than there is room for."""
        return self.shared(octets) <= self._limit and self._held(octets) <= self._by_registers(octets) + 12

    def shared(self, octets: int) -> int:
        """sizeof(Memory), and what stands after it."""
        spilled = max(1, self._products - self._held(octets)) * self.parts * PRODUCT_BYTES
        return spilled + self._besides(octets)

    def launch(self, rows: int) -> Launch:
        rows_each = parts_of(rows, self.teams)
        octets = parts_of(rows_each, OCTET)
        width = parts_of(rows_each, octets)
        teams = parts_of(rows, octets * width)
        words = teams * octets * 2 * round_up(self.layer.hidden, 32) * PIECE_BYTES // 4
        return Launch(self._kernel(min(octets, 2)), teams * self.members, self.shared(octets), octets, width, words)

    def _kernel(self, octets: int) -> Kernel:
        """For one octet, or for any number of them."""
        return self.layer.compiled(
            "grid.cu",
            threads=self.threads,
            cooperative=True,
            UNITS=self.units,
            PARTS=self.parts,
            CHUNKS=self.chunks // self.parts,
            WHOLE=int(self.layer.hidden == 32 * self.chunks),
            HELD=self._held(octets),
            ALONE=int(octets == 1),
            REGISTERS=self.registers if self.lends else 0,
            OWNERS_REGISTERS=OWNERS_REGISTERS,
            SHARED=self.shared(octets) - self._octet_bytes(octets),
        )

    @property
    def _products(self) -> int:
        return self.units // 2 * self.chunks // self.parts

    def _held(self, octets: int) -> int:
        """Products in a warp's registers: as many as there is room for, or more if shared memory has none for the others."""
        spilled = (self._limit - self._besides(1 if octets == 1 else 4)) // (self.parts * PRODUCT_BYTES)
        return min(self._products, max(self._by_registers(octets), self._products - spilled))

    def _by_registers(self, octets: int) -> int:
        """What is left beside a lane's pieces, of this turn and of the next if there are others, and what compilers need besides."""
        pieces = 4 * self.chunks // self.parts
        needed = pieces + 5 * self.parts if octets == 1 else 2 * pieces + 8 * self.parts - 8
        return (self.registers - needed) // 4

    @property
    def _limit(self) -> int:
        """Of shared memory: each block of a multiprocessor takes 1 KiB more than it asks for."""
        return (shared_limit(self.layer.device) + 1024) // self.together - 1024

    def _besides(self, octets: int) -> int:
        """Beside weights: pieces on their way, parts of sums, lengths, and what octets need."""
        arrived = (1 if octets == 1 else 2) * self.chunks * PRODUCT_BYTES
        parts = 2 * 2 * self.parts * (self.units // 4) * 32 * 8
        return arrived + parts + 4 * SORTED + self._octet_bytes(octets)

    def _octet_bytes(self, octets: int) -> int:
        """Rows and one more, cells with what is kept for the pools, and their inputs."""
        return (8 * octets + 1) * ROW_BYTES + octets * 28 * 8 * self.units


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call runs. packing: the groups and chunks of `pack`; launches: each with its first row and the one after its last."""

    packing: tuple[int, int]
    copies_state: bool
    launches: tuple[tuple[int, int, Launch], ...]


Shape = ClusterShape | GridShape
Shaped = Callable[[Layer, int], Shape | None]
"""The shape for a layer and a number of rows; that there is one depends on the layer alone."""


def refuses_persistent(problem: Problem) -> str | None:
    """What `explain` shows of both kernels, where the number of rows decides."""
    no_room = f"this device has no room for {problem.hidden} hidden units"
    return _refused_everywhere(problem, (8, 0)) or _refused_for_room(problem, _either_shape, no_room)


def refuses_cluster(problem: Problem) -> str | None:
    """What `explain` shows of the cluster kernel."""
    no_room = f"no cluster that this device can hold has room for {problem.hidden} hidden units"
    return _refused_everywhere(problem, (9, 0)) or _refused_for_room(problem, _cluster_shape, no_room)


def refuses_grid(problem: Problem) -> str | None:
    """What `explain` shows of the grid kernel."""
    no_room = f"this device has no room for {problem.hidden} hidden units"
    return _refused_everywhere(problem, (8, 0)) or _refused_for_room(problem, _grid_shape, no_room)


def how_persistent(problem: Problem) -> str:
    """Which kernel runs for how many rows."""
    layer = _layer(problem)
    bounds = sorted({shape["rows"] for shape in _tuned(layer.device) if "rows" in shape})
    shapes = [(_either_shape(layer, rows), f" up to {rows} rows") for rows in bounds] + [(_either_shape(layer, 1 << 30), "")]
    kept = [(shape, to) for n, (shape, to) in enumerate(shapes) if n + 1 == len(shapes) or shape != shapes[n + 1][0]]
    return ", ".join(f"{shape}{to}" for shape, to in kept)


def persistent(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """The faster of both kernels. Shapes as in `kernels.contract`."""
    return _encode(x, weights, state, want, _either_shape)


def cluster(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    return _encode(x, weights, state, want, _cluster_shape)


def grid(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    return _encode(x, weights, state, want, _grid_shape)


def pack(recurrent: Tensor, groups: int, chunks: int) -> Tensor:
    """The recurrent weights, (hidden, 4 x hidden), as the left operands of the tensor cores' products, padded with zeros.

    (groups of 8 units, chunks of 32 of the vector, 2 products by 2 tiles, lane, 8 values): lane 4 g + q multiplies the units
    8 q + 4 product + (0, 1, 2, 3) of the chunk; its gates are input and forget of unit g of the group, or cell and output in the
    other tile.
    """
    hidden = recurrent.shape[0]
    padded = recurrent.new_zeros(32 * chunks, 4, 8 * groups)
    padded[:hidden, :, :hidden] = recurrent.reshape(hidden, 4, hidden)
    chunk, q, product, upper, value, tile, lower, group, g = range(9)
    split = padded.view(chunks, 4, 2, 2, 2, 2, 2, groups, 8)
    return split.permute(group, chunk, product, tile, g, q, upper, lower, value).contiguous()


def _encode(x: Ragged, weights: LSTMWeights, state: LSTMState | None, want: Outputs, shaped: Shaped) -> Encoded:
    """One launch after the product of the inputs. `last` shares its memory with a state that has no slots."""
    gates = _gate_inputs(x, weights)
    rows, hidden = x.rows, weights.hidden
    slots = None if state is None or state.slots is None else as_lines(state.slots)
    after = LSTMState(*_new(gates, 2, rows, hidden).unbind()) if state is None or slots is None else _slabs(state)
    encoded = Encoded(
        state=after,
        steps=_new(gates, len(gates), hidden) if want.steps else None,
        last=(after.hidden if slots is None else _new(gates, rows, hidden)) if want.last else None,
        mean=_new(gates, rows, hidden) if want.mean else None,
        max=_new(gates, rows, hidden) if want.max else None,
    )
    if not rows:
        return encoded
    plan = _plan(shaped, gates.device, weights.recurrent.dtype, gates.dtype == torch.float32, hidden, rows)
    packed = weights.packed.get(plan.packing)
    if packed is None:
        packed = weights.packed[plan.packing] = pack(weights.recurrent, *plan.packing)
    before = state.by_row() if state is not None and plan.copies_state else state
    hidden_before, cell_before = (None, None) if before is None else map(_as_read, (before.hidden, before.cell))
    slots_before, offsets = _lines_before(before, slots), x.offsets.contiguous()
    read = (gates, packed, offsets, slots_before, slots, hidden_before, cell_before)
    written = (after.hidden, after.cell, encoded.steps, None if slots is None else encoded.last, encoded.mean, encoded.max)
    members = [0 if array is None else array.data_ptr() for array in (*read, *written)]
    with current(gates.device):
        for first, until, launch in plan.launches:
            exchange = gates.new_zeros(launch.exchange_words, dtype=torch.int32) if launch.exchange_words else None
            sizes = (offsets.dtype == torch.int64, first, until, hidden, launch.octets, launch.width)
            launch.kernel.launch(
                (launch.blocks, 1, 1), launch.shared, (*members, 0 if exchange is None else exchange.data_ptr(), *sizes)
            )
    return encoded


def _gate_inputs(x: Ragged, weights: LSTMWeights) -> Tensor:
    """(tokens, 4 x hidden) in the dtype of the weights, or float32 where they are given so."""
    storage = weights.recurrent.dtype
    if weights.input is None or weights.bias is None:
        given = in_either(x.data, storage)
        return given if given.data_ptr() % 4 == 0 else given.clone()  # the grid kernel reads whole words
    return torch.addmm(weights.bias, x.data if x.data.dtype == storage else x.data.to(storage), weights.input)


def _lines_before(before: LSTMState | None, slots: Tensor | None) -> Tensor | None:
    """The places that rows go on from, as kernels read them; slots: those where their new states go, which most often are the same."""
    if before is None or before.slots is None:
        return None
    return slots if before.sources is None else as_lines(before.sources)


def _as_read(values: Tensor) -> Tensor:
    """Itself, of a state in slots."""
    return values.float().contiguous()


def _slabs(state: LSTMState) -> LSTMState:
    """The same slabs, since they are written in place; raises ContractError when a kernel could not."""
    for name, slab in (("hidden", state.hidden), ("cell", state.cell)):
        check_slab(name, slab)
    return moved_on(state)


def _new(like: Tensor, *sizes: int) -> Tensor:
    return like.new_empty(sizes, dtype=torch.float32)


def _refused_everywhere(problem: Problem, needed: Capability) -> str | None:
    return refused_by_device(problem, needed, halves=True)


def _refused_for_room(problem: Problem, shaped: Shaped, reason: str) -> str | None:
    layer = _layer(problem)
    return reason if shaped(layer, 1) is None else None


def _layer(problem: Problem) -> Layer:
    return Layer(index_of(problem.device), problem.storage == torch.bfloat16, gates_float32=False, hidden=problem.hidden)


@cache
def _either_shape(layer: Layer, rows: int) -> Shape | None:
    """The fastest of the shapes that fit and can run."""
    return next(_shapes(layer, rows, ("blocks", "units")), None)


@cache
def _cluster_shape(layer: Layer, rows: int) -> Shape | None:
    return next(_shapes(layer, rows, ("blocks",)), None)


@cache
def _grid_shape(layer: Layer, rows: int) -> Shape | None:
    return next(_shapes(layer, rows, ("units",)), None)


def _shapes(layer: Layer, rows: int, kinds: Sequence[str]) -> Iterator[Shape]:
    """Those of the table that fit and can run: of a cluster so many blocks, of the grid so many units."""
    for kind, size in covering(_tuned(layer.device), kinds, hidden=layer.hidden, rows=rows):
        if kind == "blocks":
            clusters = ClusterShape(layer, size)
            if _has_clusters(layer.device) and clusters.fits(1) and clusters.resident():
                yield clusters
        elif (teams := GridShape(layer, size)).fits():
            yield teams


def _has_clusters(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _plan(shaped: Shaped, device: torch.device, storage: torch.dtype, gates_float32: bool, hidden: int, rows: int) -> Plan:
    """As many launches as the rows need, which is one unless they are many."""
    shape = shaped(Layer(index_of(device), storage == torch.bfloat16, gates_float32, hidden), rows)
    if shape is None:
        raise ContractError(f"this device has no room for an LSTM of {hidden} hidden units in one launch")
    bounds = [(first, min(rows, first + shape.most_rows)) for first in range(0, rows, shape.most_rows)]
    launches = tuple((first, until, shape.launch(until - first)) for first, until in bounds)
    return Plan((shape.groups, shape.chunks), shape.copies_state, launches)


def _tuned(device: int) -> Sequence[Mapping[str, int]]:
    shapes: Sequence[Mapping[str, int]] = tuned(HERE / "tuned", torch.cuda.get_device_name(device))["shapes"]
    return shapes
