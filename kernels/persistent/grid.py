"""Launch shapes of grid.cu, which runs a layer in teams of blocks spread over the whole device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.compile import Kernel, lends_registers, registers, resident_blocks, shared_limit
from kernels.launching import ceil_div, multiprocessors, round_up
from kernels.persistent.packing import (
    OCTET,
    PIECE_BYTES,
    PRODUCT_BYTES,
    ROW_BYTES,
    SAME_SUMS,
    SORTED,
    Launch,
    Packing,
    Variant,
)

OWNERS_REGISTERS = 72
"""Registers of a thread that owns a cell, where warps lend registers."""


@dataclass(frozen=True)
class GridShape:
    """Teams of blocks with `units` hidden units in each block."""

    copies_state: ClassVar[bool] = True
    """A state in slots is copied: a block may finish and overwrite it before another block starts."""
    variant: Variant
    units: int

    def __str__(self) -> str:
        return f"the grid with {self.units} units per block"

    @property
    def parts(self) -> int:
        """Warps that multiply, each its part of the hidden vector: the quarters that a cluster sums, or eighths."""
        return 4 if self.variant.hidden <= SAME_SUMS else 8

    @property
    def blocks_per_multiprocessor(self) -> int:
        return 8 // self.parts

    @property
    def members(self) -> int:
        """Blocks of a team, which runs the whole layer."""
        return ceil_div(self.variant.hidden, self.units)

    @property
    def groups(self) -> int:
        """Groups of 8 hidden units, as in `pack`."""
        return self.members * self.units // 8

    @property
    def chunks(self) -> int:
        """Chunks of 32 hidden units, as in `pack`."""
        return ceil_div(self.variant.hidden, 32 * self.parts) * self.parts

    @property
    def packing(self) -> Packing:
        return Packing(self.groups, self.chunks)

    @property
    def teams(self) -> int:
        """Teams that run at once."""
        return multiprocessors(self.variant.device) * self.blocks_per_multiprocessor // self.members

    @property
    def lends(self) -> bool:
        """Whether the warps that own cells lend most of their registers to the warps that multiply."""
        return self.units > OCTET and lends_registers(self.variant.device)

    @property
    def threads(self) -> int:
        """Threads of a block: a warp for each part and two for each 8 units, in fours where warps lend registers."""
        threads = 32 * self.parts + 8 * self.units
        return round_up(threads, 128) if self.lends else threads

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies: its own at the start of a block, and registers that other threads lend."""
        before, multiply = registers(self.threads * self.blocks_per_multiprocessor), 32 * self.parts
        lent = (self.threads - multiply) * (before - OWNERS_REGISTERS) if self.lends else 0
        return before + lent // multiply // 8 * 8

    @property
    def runs_both(self) -> bool:
        """Whether one launch may run both directions: all blocks of a launch run at once."""
        return self.teams > 1

    @property
    def max_octets(self) -> int:
        """The most octets of a tile."""
        return next(octets for octets in range(SORTED // OCTET, 0, -1) if self.fits(octets))

    def max_rows(self, directions: int = 1) -> int:
        """Return the maximum number of rows in one launch, over all teams of a direction."""
        return self.teams // directions * OCTET * self.max_octets

    def runs(self) -> bool:
        """Return whether the device runs all blocks of a team at once."""
        return self.has_room() and self.resident() >= self.blocks_per_multiprocessor

    def has_room(self) -> bool:
        """Return whether the device has room for one team, by the sizes alone: nothing is compiled. Weights of two terms have none."""
        return self.variant.terms == 1 and self.teams > 0 and self.fits(1)

    def resident(self) -> int:
        """Return how many blocks a multiprocessor runs at once, whether a tile has one octet or more."""
        return min(resident_blocks(self._kernel(min(octets, 2)), self.shared(octets)) for octets in {1, self.max_octets})

    def fits(self, octets: int) -> bool:
        """Return whether a block has room for a tile of this many octets. The compiler finds up to 12 products more in registers."""
        return self.shared(octets) <= self._limit and self._products_in_registers(octets) <= self._register_room(octets) + 12

    def shared(self, octets: int) -> int:
        """Return the bytes of shared memory of a block: sizeof(Memory) and the octets' memory behind it."""
        spilled = max(1, self._products - self._products_in_registers(octets)) * self.parts * PRODUCT_BYTES
        return spilled + self._other_bytes(octets)

    def launch(self, rows: int, directions: int = 1) -> Launch:
        """Return the launch for this many rows, which are spread over all teams of a direction."""
        rows_each = ceil_div(rows, self.teams // directions)
        octets = ceil_div(rows_each, OCTET)
        width = ceil_div(rows_each, octets)
        teams = ceil_div(rows, octets * width)
        words = teams * octets * 2 * round_up(self.variant.hidden, 32) * PIECE_BYTES // 4
        kernel = self._kernel(min(octets, 2), directions)
        return Launch(kernel, teams * self.members, self.shared(octets), octets, width, words)

    def _kernel(self, octets: int, directions: int = 1) -> Kernel:
        """Return the kernel for one octet, or the kernel for any other number of them."""
        return self.variant.load(
            "grid.cu",
            threads=self.threads,
            cooperative=True,
            SIDES=directions,
            UNITS=self.units,
            PARTS=self.parts,
            CHUNKS=self.chunks // self.parts,
            WHOLE=int(self.variant.hidden == 32 * self.chunks),
            HELD=self._products_in_registers(octets),
            ALONE=int(octets == 1),
            REGISTERS=self.registers if self.lends else 0,
            OWNERS_REGISTERS=OWNERS_REGISTERS,
            SHARED=self.shared(octets) - self._octet_bytes(octets),
        )

    @property
    def _products(self) -> int:
        """Products of a warp for each octet and step."""
        return self.units // 2 * self.chunks // self.parts

    def _products_in_registers(self, octets: int) -> int:
        """Return how many products' weights a warp holds in registers: as many as fit, or more if shared memory lacks the room."""
        spilled = (self._limit - self._other_bytes(1 if octets == 1 else 4)) // (self.parts * PRODUCT_BYTES)
        return min(self._products, max(self._register_room(octets), self._products - spilled))

    def _register_room(self, octets: int) -> int:
        """Return how many products' weights fit into registers next to a lane's pieces and the registers that the compiler needs.

        With several octets, a lane also holds the pieces of the next octet.
        """
        pieces = 4 * self.chunks // self.parts
        needed = pieces + 5 * self.parts if octets == 1 else 2 * pieces + 8 * self.parts - 8
        return (self.registers - needed) // 4

    @property
    def _limit(self) -> int:
        """Bytes of shared memory of a block. Each block takes 1 KiB more than it requests."""
        return (shared_limit(self.variant.device) + 1024) // self.blocks_per_multiprocessor - 1024

    def _other_bytes(self, octets: int) -> int:
        """Return the bytes besides weights: arriving pieces, partial sums, lengths, and the octets' memory."""
        arriving = (1 if octets == 1 else 2) * self.chunks * PRODUCT_BYTES
        sums = 2 * 2 * self.parts * (self.units // 4) * 32 * 8
        return arriving + sums + 4 * SORTED + self._octet_bytes(octets)

    def _octet_bytes(self, octets: int) -> int:
        """Return the bytes of the rows and a sentinel, and of cells, pooled values and gate inputs."""
        return (8 * octets + 1) * ROW_BYTES + octets * 28 * 8 * self.units
