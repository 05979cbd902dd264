"""Launch shapes of cluster.cu, which runs a layer in one thread-block cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.compile import Kernel, is_hopper_or_newer, registers, resident_clusters, shared_limit
from kernels.launching import ceil_div, round_up
from kernels.persistent.packing import OCTET, PIECE_BYTES, PRODUCT_BYTES, ROW_BYTES, SORTED, Launch, Packing, Variant

OCTETS = (1, 2, 3, 5)
"""Octets of a cluster's tile; each number is compiled into a separate kernel."""


@dataclass(frozen=True)
class ClusterShape:
    """A cluster of `blocks` blocks."""

    runs_both: ClassVar[bool] = True
    """One launch may run both directions."""
    copies_state: ClassVar[bool] = False
    """No copy of a state in slots is needed: no block overwrites it before every other block has read it."""
    variant: Variant
    blocks: int

    def __str__(self) -> str:
        return f"clusters of {self.blocks} blocks"

    @property
    def padded(self) -> int:
        """Hidden units of all blocks: whole groups in each block, whole chunks in both halves.

        It does not depend on the number of blocks, so that a row's sums do not either.
        """
        return round_up(self.variant.hidden, 64 if self.variant.hidden <= 128 else 128)

    @property
    def units(self) -> int:
        """Hidden units of a block."""
        return self.padded // self.blocks

    @property
    def groups(self) -> int:
        """Groups of 8 hidden units, as in `pack`."""
        return self.padded // 8

    @property
    def chunks(self) -> int:
        """Chunks of 32 hidden units, as in `pack`."""
        return self.padded // 32

    @property
    def packing(self) -> Packing:
        return Packing(self.groups, self.chunks)

    @property
    def threads(self) -> int:
        return 8 * self.units

    def max_rows(self, directions: int = 1) -> int:
        """Return the rows of one launch: practically unlimited, because clusters that do not fit wait until others have finished."""
        return 1 << 30

    def runs(self) -> bool:
        """Return whether the device supports clusters and one fits."""
        return self.has_room() and self.resident() > 0

    def has_room(self) -> bool:
        """Return whether a block has room, by the sizes alone: nothing is compiled."""
        return is_hopper_or_newer(self.variant.device) and self.fits(1)

    def fits(self, octets: int) -> bool:
        """Return whether a block has enough registers and shared memory for a tile of this many octets."""
        if self.units % 8 or self.threads > 1024 or self._products_in_registers(octets) < 1:
            return False
        return self.shared(octets) <= shared_limit(self.variant.device)

    def shared(self, octets: int) -> int:
        """Return the bytes of shared memory of a block: sizeof(Memory)."""
        warps = self.threads // 32
        terms = self.variant.terms
        spilled = max(1, self._products - self._products_in_registers(octets)) * warps * PRODUCT_BYTES
        buffers, halves = 2 * terms * self.padded * PIECE_BYTES, warps * PRODUCT_BYTES
        outgoing, cells, rows, barriers = terms * 8 * (self.units + 8) * 2, 12 * self.threads, 8 * ROW_BYTES, 16
        return round_up(spilled + octets * (buffers + halves + outgoing + cells + rows + barriers) + 4 * SORTED, 16)

    def kernel(self, octets: int, directions: int = 1) -> Kernel:
        return self.variant.load(
            "cluster.cu",
            threads=self.threads,
            cluster=self.blocks,
            CTAS=self.blocks,
            UNITS=self.units,
            OCTETS=octets,
            SIDES=directions,
            HELD=self._products_in_registers(octets),
            SHARED=self.shared(octets),
        )

    def resident(self) -> int:
        """Return how many clusters run at once with one block on each multiprocessor."""
        return resident_clusters(self.kernel(1), max(self.shared(1), shared_limit(self.variant.device) // 2 + 1))

    def launch(self, rows: int, directions: int = 1) -> Launch:
        """Return the launch for this many rows. Rows are spread over all clusters that run at once: fewer rows, less to exchange."""
        rows_each = ceil_div(rows, max(1, self.resident() // directions))
        fitting = [octets for octets in OCTETS if self.fits(octets)]
        octets = next((octets for octets in fitting if octets * OCTET >= rows_each), fitting[-1])
        width = min(OCTET, ceil_div(rows_each, octets))
        blocks = ceil_div(rows, octets * width) * self.blocks
        return Launch(self.kernel(octets, directions), blocks, self.shared(octets), octets, width)

    @property
    def _products(self) -> int:
        """Weights of a warp for one octet, in products."""
        return self.variant.terms * self.padded // 16

    def _products_in_registers(self, octets: int) -> int:
        """Return how many products' weights a warp holds in registers: all, or as many as leave room for everything else."""
        return min(self._products, (registers(self.threads) - (28 + 32 * self.variant.terms) - 8 * octets) // 4)
