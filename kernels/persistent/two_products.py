"""Launch shapes and packed weights of two_products.cu, which runs layers with two dependent products in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.nn import functional

from kernels.compile import Kernel, is_hopper_or_newer, registers, resident_clusters, shared_limit
from kernels.launching import ceil_div, multiprocessors, round_up
from kernels.persistent.packing import OCTET, PIECE_BYTES, PRODUCT_BYTES, ROW_BYTES, SORTED, Launch, Variant

THREADS = 256
PARTS = THREADS // 32
"""Warps of a block. Each multiplies its part of the vectors."""
OCTETS = (1, 2, 4)
"""Octets of a tile; each number is compiled into a separate kernel."""
TILE_ROWS = 16
"""Weight rows of a tensor-core product."""


class TwoProductsPacking(NamedTuple):
    """The layout of the weights of both products, for `members` blocks. units, outputs: of a block."""

    members: int
    units: int
    outputs: int

    def pack(self, layer: Any, number: int) -> Tensor:
        """Return the weights of the first product (number 0) or of the second one, as left operands of tensor-core products."""
        matrix = matrices(layer)[number]
        return self._pack_outputs(matrix) if number else self._pack_gates(matrix, layer.hidden)

    def _pack_gates(self, matrix: Tensor, hidden: int) -> Tensor:
        """Return the packed weights of an LSTM's four gates or a GRU's reset and update gates, (vector, 4 or 2 x hidden)."""
        entries, gates = len(matrix), matrix.shape[1] // hidden
        units = self.members * self.units
        padded = functional.pad(matrix.reshape(entries, gates, hidden), (0, units - hidden))
        by_group = padded.view(entries, gates // 2, 2, units // OCTET, OCTET).permute(0, 3, 1, 2, 4)
        return pack_tiles(by_group.reshape(entries, -1, TILE_ROWS))

    def _pack_outputs(self, matrix: Tensor) -> Tensor:
        """Return the packed weights of the second product, (hidden, vector)."""
        entries, vector = matrix.shape
        by_block = functional.pad(matrix, (0, self.members * self.outputs - vector)).view(entries, self.members, self.outputs)
        return pack_tiles(functional.pad(by_block, (0, -self.outputs % TILE_ROWS)).reshape(entries, -1, TILE_ROWS))


def matrices(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the matrices of both products: (vector, 4 or 2 x hidden) and (hidden, vector)."""
    projection: Tensor | None = getattr(layer, "projection", None)
    if projection is not None:
        return layer.recurrent, projection
    hidden = layer.hidden
    return layer.recurrent[:, : 2 * hidden], layer.recurrent[:, 2 * hidden :]


def chunks_of(vector: int) -> int:
    """Return the chunks of 32 numbers of a vector, as many for each warp."""
    return ceil_div(vector, 32 * PARTS) * PARTS


def pack_tiles(matrix: Tensor) -> Tensor:
    """Return a matrix, (entries, tiles, 16), as left operands of tensor-core products, padded with zeros.

    Shape: (tiles, chunks of 32 entries, 2 products, lane, 8 values). Lane 4 g + q multiplies the entries 8 q + 4 product + (0, 1, 2, 3) of
    the chunk, by the weight rows g and g + 8 of the tile.
    """
    entries, tiles, _ = matrix.shape
    chunks = chunks_of(entries)
    padded = functional.pad(matrix, (0, 0, 0, 0, 0, 32 * chunks - entries))
    chunk, q, product, upper, value, tile, lower, g = range(8)
    split = padded.view(chunks, 4, 2, 2, 2, tiles, 2, 8)
    return split.permute(tile, chunk, product, g, q, upper, lower, value).reshape(tiles, chunks, 2, 32, 8).contiguous()


@dataclass(frozen=True)
class TwoProductsShape:
    """Tiles of blocks that hold the weights of a layer. size: the number of its name in the files of `tuned`."""

    copies_state: ClassVar[bool] = False
    """No copy of a state in slots is needed: the thread that overwrites a value is the only one that reads it."""
    cluster: ClassVar[bool]
    variant: Variant
    size: int

    @property
    def members(self) -> int:
        """Blocks of a tile."""
        raise NotImplementedError

    def at_once(self) -> int:
        """Return how many tiles run at once."""
        raise NotImplementedError

    @property
    def units(self) -> int:
        """Hidden units of a block: whole groups of 8."""
        return round_up(ceil_div(self.variant.hidden, self.members), OCTET)

    @property
    def outputs(self) -> int:
        """Numbers of the hidden state of a block: whole groups of 8."""
        return round_up(ceil_div(self.variant.vector, self.members), OCTET)

    @property
    def packing(self) -> TwoProductsPacking:
        return TwoProductsPacking(self.members, self.units, self.outputs)

    @property
    def products(self) -> int:
        """Weights of a warp, in products."""
        return sum(2 * chunks // PARTS * tiles for chunks, tiles in zip(self._chunks, self._tiles, strict=True))

    def held(self, octets: int) -> int:
        """Return how many products' weights a warp holds in registers: as many as leave room for everything else."""
        cells = ceil_div(max(self.units, self.outputs) * OCTET, THREADS)
        chunks = max(self._chunks) // PARTS
        arriving = 4 * chunks if self.cluster else 4 * chunks + 8 * min(4, chunks)
        return min(self.products, (registers(THREADS) - 80 - arriving - 8 * octets * cells) // 4)

    def fits(self, octets: int) -> bool:
        """Return whether a block has room for a tile of this many octets."""
        return self.held(octets) > 0 and self.shared(octets) <= shared_limit(self.variant.device)

    def shared(self, octets: int) -> int:
        """Return the bytes of shared memory of a block: sizeof(Memory)."""
        spilled = max(1, self.products - self.held(octets)) * PARTS * PRODUCT_BYTES
        parts = PARTS * max(self._tiles) * PRODUCT_BYTES
        buffers = sum(round_up(width, 32) * PIECE_BYTES for width in self._widths) if self.cluster else 0
        outgoing, cells, barriers = OCTET * 2 * (max(self.units, self.outputs) + 8), 3 * 4 * 8 * self.outputs, 16
        return spilled + octets * (parts + buffers + outgoing + cells + OCTET * ROW_BYTES + barriers) + 4 * SORTED

    def kernel(self, octets: int, directions: int = 1) -> Kernel:
        return self.variant.load(
            "two_products.cu",
            threads=THREADS,
            cluster=self.members if self.cluster else 1,
            cooperative=not self.cluster,
            CLUSTER=int(self.cluster),
            MEMBERS=self.members,
            HIDDEN=self.variant.hidden,
            VECTOR=self.variant.vector,
            UNITS=self.units,
            OUTPUTS=self.outputs,
            OCTETS=octets,
            SIDES=2 * directions,
            HELD=self.held(octets),
            SHARED=self.shared(octets),
        )

    def launch(self, rows: int, directions: int = 1) -> Launch:
        """Return the launch for this many rows, which are spread over all tiles that run at once."""
        rows_each = ceil_div(rows, max(1, self.at_once() // directions))
        fitting = self._fitting
        octets = next((octets for octets in fitting if octets * OCTET >= rows_each), fitting[-1])
        width = min(OCTET, ceil_div(rows_each, octets))
        tiles = ceil_div(rows, octets * width)
        words = 0 if self.cluster else tiles * octets * self._exchange_bytes // 4
        return Launch(self.kernel(octets, directions), tiles * self.members, self.shared(octets), octets, width, words)

    @property
    def _exchange_bytes(self) -> int:
        """Bytes of an octet of both vectors on their way through L2. Values without a bound take twice their size."""
        hidden, between = (round_up(width, 32) * PIECE_BYTES for width in self._widths)
        return (1 if self.variant.gru else 2) * hidden + between

    @property
    def _fitting(self) -> Sequence[int]:
        return [octets for octets in OCTETS if self.fits(octets)]

    @property
    def _widths(self) -> tuple[int, int]:
        """Widths of the vectors that the products read."""
        return self.variant.vector, self.variant.hidden

    @property
    def _chunks(self) -> tuple[int, int]:
        return chunks_of(self.variant.vector), chunks_of(self.variant.hidden)

    @property
    def _tiles(self) -> tuple[int, int]:
        """Tiles of weight rows of a block, for both products."""
        return self.units // OCTET * (1 if self.variant.gru else 2), ceil_div(self.outputs, TILE_ROWS)


class TwoProductsCluster(TwoProductsShape):
    """A cluster of `size` blocks."""

    cluster: ClassVar[bool] = True
    runs_both: ClassVar[bool] = True
    """One launch may run both directions."""

    def __str__(self) -> str:
        return f"clusters of {self.size} blocks"

    @property
    def members(self) -> int:
        return self.size

    def max_rows(self, directions: int = 1) -> int:
        """Return the rows of one launch: practically unlimited, because clusters that do not fit wait until others have finished."""
        return 1 << 30

    def runs(self) -> bool:
        """Return whether the device supports clusters and one fits."""
        return self.has_room() and self.at_once() > 0

    def has_room(self) -> bool:
        """Return whether a block has room, by the sizes alone: nothing is compiled."""
        return is_hopper_or_newer(self.variant.device) and self.variant.terms == 1 and self.fits(1)

    def at_once(self) -> int:
        """Return how many clusters run at once with one block on each multiprocessor."""
        return resident_clusters(self.kernel(1), max(self.shared(1), shared_limit(self.variant.device) // 2 + 1))


class TwoProductsGrid(TwoProductsShape):
    """Teams of blocks with `size` hidden units in each block, spread over the device."""

    cluster: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"the grid with {self.size} units per block"

    @property
    def members(self) -> int:
        return ceil_div(self.variant.hidden, self.size)

    @property
    def runs_both(self) -> bool:
        """Whether one launch may run both directions: all blocks of a launch run at once."""
        return self.at_once() > 1

    def max_rows(self, directions: int = 1) -> int:
        """Return the maximum number of rows in one launch, over all teams of a direction."""
        return self.at_once() // directions * OCTET * self._fitting[-1]

    def runs(self) -> bool:
        """Return whether the device runs all blocks of a team at once."""
        return self.has_room()

    def has_room(self) -> bool:
        """Return whether the device has room for one team, by the sizes alone: nothing is compiled."""
        return self.variant.terms == 1 and self.at_once() > 0 and self.fits(1)

    def at_once(self) -> int:
        """Return how many teams run at once, with one block on each multiprocessor."""
        return multiprocessors(self.variant.device) // self.members
