"""Launch shapes of wide.cu, which runs large layers over many rows in teams of blocks with products of whole warp groups, and several
levels of such layers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.compile import Kernel, resident_clusters, shared_limit
from kernels.launching import ceil_div, multiprocessors, round_up
from kernels.persistent.packing import OCTET, ROW_BYTES, SORTED, Launch, Variant, WidePacking

UNITS, DEPTH = 16, 64
"""Hidden units of a block, and of a chunk of the hidden vector."""
GROUP = 128
"""Threads of a warp group."""
PAIR = 2
"""Blocks of a cluster."""
TILES = 2
"""Tiles of a team: one multiplies while the cells of the other advance."""
STAGES = range(8, 3, -1)
"""Chunks that may arrive at once, the fastest number first."""
COUNTERS = 32
"""Counters of a tile, and the maximum number of chunks of the hidden vector."""
BUFFERS = 4
"""Steps that a level keeps for the level above it."""
ALIGNED = 1024


@dataclass(frozen=True)
class WideShape:
    """Teams of blocks with tiles of `tile` rows. Each of `levels` levels has as many teams as the others."""

    runs_both: ClassVar[bool] = False
    """All blocks of a launch run at once, and most layers leave no room for a second direction."""
    copies_state: ClassVar[bool] = False
    """No copy of a state in slots is needed: a block reads and writes the states of its own units only."""
    packing: ClassVar[WidePacking] = WidePacking()
    variant: Variant
    tile: int
    levels: int = 1

    def __str__(self) -> str:
        return f"wide tiles of {self.tile} rows"

    @property
    def members(self) -> int:
        """Blocks of a team, which runs a whole level."""
        return self.variant.hidden // UNITS

    @property
    def chunks(self) -> int:
        """Chunks of the hidden vector."""
        return self.variant.hidden // DEPTH

    @property
    def most_chunks(self) -> int:
        """The most chunks that a level multiplies: a level above the first has those of its inputs too."""
        return self.chunks * min(self.levels, 2)

    @property
    def teams(self) -> int:
        """Teams of each level that run at once."""
        return PAIR * resident_clusters(self._kernel(TILES), self.shared(TILES)) // (self.members * self.levels)

    def max_rows(self, directions: int = 1) -> int:
        """Return the maximum number of rows in one launch, over all teams."""
        return self.teams * TILES * self.tile

    def has_room(self) -> bool:
        """Return whether the device has these products and room for one team by the sizes alone. Weights of two terms have none."""
        variant = self.variant
        if torch.cuda.get_device_capability(variant.device) != (9, 0) or variant.terms > 1:
            return False
        whole = variant.hidden % DEPTH == 0 and self.chunks <= COUNTERS
        return whole and self.levels * self.members <= multiprocessors(variant.device) and self.resident(TILES) > 0

    def runs(self) -> bool:
        """Return whether the device has room for one team, as its driver counts."""
        return self.has_room() and self.teams > 0

    def launch(self, rows: int, directions: int = 1) -> Launch:
        """Return the launch for this many rows, which are spread over all teams."""
        rows_each = ceil_div(rows, self.teams)
        tiles = min(TILES, ceil_div(rows_each, self.tile))
        octets = tiles * self.tile // OCTET
        width = ceil_div(rows_each, octets)
        teams = ceil_div(rows, octets * width)
        words = teams * tiles * (COUNTERS + self._buffers * self.variant.hidden * self.tile // 2)
        return Launch(self._kernel(tiles), teams * self.members, self.shared(tiles), octets, width, words)

    def stages(self, tiles: int) -> int:
        """Return how many chunks may arrive at once."""
        limit = shared_limit(self.variant.device)
        whole = (stages for stages in STAGES if self._bytes(tiles, self.most_chunks, stages) <= limit)
        return next(whole, STAGES[-1])

    def resident(self, tiles: int) -> int:
        """Return how many chunks' weights stay in shared memory: all of them, or as many as fit."""
        limit, stages = shared_limit(self.variant.device), self.stages(tiles)
        return next((chunks for chunks in range(self.most_chunks, 0, -1) if self._bytes(tiles, chunks, stages) <= limit), 0)

    def shared(self, tiles: int) -> int:
        """Return the bytes of shared memory of a block: sizeof(Memory)."""
        return self._bytes(tiles, self.resident(tiles), self.stages(tiles))

    def _bytes(self, tiles: int, resident: int, stages: int) -> int:
        left, right = 4 * UNITS * DEPTH * 2, self.tile * DEPTH * 2
        weights = left * (resident if resident == self.most_chunks else resident + stages)
        gate_bytes = 4 if self.variant.gates_float32 else 2
        gates = 3 if self.variant.gru else 4
        rows = tiles * self.tile * (UNITS * (gates * gate_bytes + 2) + ROW_BYTES)
        return round_up(stages * right + weights + rows + 4 * SORTED + 16 * stages + 8, ALIGNED)

    @property
    def _buffers(self) -> int:
        """Steps of hidden values that a level keeps."""
        return BUFFERS if self.levels > 1 else 2

    def _kernel(self, tiles: int) -> Kernel:
        return self.variant.load(
            "wide.cu",
            threads=tiles * GROUP + 32,
            cluster=PAIR,
            cooperative=True,
            SIDES=self.levels,
            ROWS=self.tile,
            TILES=tiles,
            CHUNKS=self.chunks,
            RESIDENT=self.resident(tiles),
            BUFFERS=self._buffers,
            STAGES=self.stages(tiles),
            SHARED=self.shared(tiles),
        )
