"""Launch shapes and packed weights of step.cu, which runs many rows by one product of inputs and hidden values for each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kernels.compile import Kernel, resident_clusters, shared_limit
from kernels.launching import PIECE, ceil_div, multiprocessors, round_up, swizzled
from kernels.persistent.packing import Launch, Variant, two_terms
from kernels.ragged import ContractError

DEPTH, PART = 64, 16
"""Entries of a chunk of both vectors, and hidden units of a part of a tile."""
GROUP, GROUP_ROWS = 128, 64
"""Threads of a warp group, and the rows that it multiplies."""
STAGES = range(8, 1, -1)
"""Chunks that may arrive at once, the fastest number first."""
DIRECT_UNITS = 256
"""Hidden units up to which blocks read the first hidden values from the states: few blocks read the same values."""
TWO_TERMS_UNITS = 32
PLACE_BYTES, ALIGNED = 32, 1024


@dataclass(frozen=True)
class StepPacking:
    """The layout of the weights in step.cu. resets_before: a GRU's reset and update gates come before its new gate."""

    resets_before: bool = False

    def pack(self, recurrent: Tensor) -> Tensor:
        return self._by_phase(pack_columns, recurrent)

    def pack_with_inputs(self, inputs: Tensor, recurrent: Tensor) -> Tensor:
        """Return the weights of both vectors: the chunks of the inputs before the chunks of the hidden vector."""
        return self._by_phase(pack_columns, inputs, recurrent)

    def pack_terms(self, recurrent: Tensor, scale: Tensor) -> Tensor:
        """Return float32 weights as `pack` returns float16 weights, each chunk three times in the order in which step.cu multiplies
        them: the scaled weights in float16 for the small terms of the hidden values, the remainders, and the scaled weights again."""

        def terms(matrix: Tensor, hidden: int) -> Tensor:
            first, second = (pack_columns(term, hidden) for term in two_terms(matrix * scale))
            return torch.stack((first, second, first), dim=1).flatten(0, 1)

        return self._by_phase(terms, recurrent)

    def _by_phase(self, pack: Callable[[Tensor, int], Tensor], *matrices: Tensor) -> Tensor:
        """Return packed matrices, phase by phase: each has the columns of the gates of its phase."""
        hidden = len(matrices[-1])
        phases = ([matrix[:, gates] for matrix in matrices] for gates in self._phases(hidden))
        return torch.cat([pack(matrix, hidden).flatten() for phase in phases for matrix in phase])

    def _phases(self, hidden: int) -> tuple[slice, ...]:
        return (slice(2 * hidden), slice(2 * hidden, None)) if self.resets_before else (slice(None),)


def pack_columns(matrix: Tensor, hidden: int) -> Tensor:
    """Return the weights of a vector, (entries, 4 or 3 x hidden), as right operands of wgmma, padded with zeros.

    Shape: (chunks of 64 entries, parts of 16 units, gates by 2 halves, 8 columns, 8 pieces, 8 values). Column 2 q + low of a half has unit
    4 q + 2 half + low of the part: a lane has the sums of four neighbouring units. The pieces of a column are swizzled.
    """
    entries, gates = len(matrix), matrix.shape[1] // hidden
    chunks, units = ceil_div(entries, DEPTH), round_up(hidden, DEPTH)
    missing = (0, units - hidden, 0, 0, 0, chunks * DEPTH - entries)
    chunk, entry, gate, part, q, half, low = range(7)
    split = functional.pad(matrix.reshape(entries, gates, hidden), missing).view(chunks, DEPTH, gates, units // PART, 4, 2, 2)
    columns = split.permute(chunk, part, gate, half, q, low, entry)
    return swizzled(columns.reshape(chunks, units // PART, 2 * gates, 8, 8, 8))


@dataclass(frozen=True)
class StepShape:
    """Tiles of `rows` rows by up to `most_units` hidden units."""

    runs_both: ClassVar[bool] = False
    variant: Variant
    most_units: int
    rows: int

    def __str__(self) -> str:
        return "tiles of all rows" if self.variant.vector else "one product a step"

    @property
    def packing(self) -> StepPacking:
        return StepPacking(self.variant.vector > 0)

    @property
    def units(self) -> int:
        """Hidden units of a tile. With two terms, a thread also has the sums of the chunks before."""
        return min(self.most_units, TWO_TERMS_UNITS) if self.variant.terms > 1 else self.most_units

    @property
    def pair(self) -> int:
        """Blocks of a cluster, which fetch weights for each other."""
        return 2 if self.rows > GROUP_ROWS else 1

    @property
    def direct(self) -> bool:
        return self.variant.hidden <= DIRECT_UNITS

    @property
    def copies_state(self) -> bool:
        """Whether a state must be copied if rows end in the slots from which they start: another block may not have read it."""
        return self.direct

    def max_rows(self, directions: int = 1) -> int:
        """Return the rows of one launch: practically unlimited, because blocks take the tiles in turns."""
        return 1 << 30

    def has_room(self) -> bool:
        """Return whether the device has the instructions, and whether the rows of states have whole pieces. An LSTM with a projection has
        another kernel."""
        hopper = torch.cuda.get_device_capability(self.variant.device) == (9, 0)
        return hopper and self.variant.hidden % PIECE == 0 and not self.variant.projected

    def runs(self) -> bool:
        """Return whether a cluster fits, as the driver counts."""
        return self.has_room() and self._clusters(self._kernel()) > 0

    def launch(self, rows: int, directions: int = 1) -> Launch:
        """Return the launch for this many rows."""
        kernel, words = self._kernel(), rows * self.variant.hidden * (self.variant.terms + (3 if self.variant.vector else 1))
        tiles = ceil_div(rows, self.pair * self.rows) * ceil_div(self.variant.hidden, self.units)
        blocks = self.pair * min(tiles, self._clusters(kernel))
        return Launch(kernel, blocks, self._shared, exchange_words=words, zeroed=False, early=True)

    def _clusters(self, kernel: Kernel) -> int:
        """Return how many clusters run at once, with one block on each multiprocessor."""
        return resident_clusters(kernel, self._shared) if self.pair > 1 else multiprocessors(self.variant.device)

    @property
    def _stage_bytes(self) -> int:
        gates = 2 if self.variant.vector else 3 if self.variant.gru else 4
        return (self.rows + gates * self.units) * DEPTH * 2

    @property
    def _stages(self) -> int:
        limit = shared_limit(self.variant.device)
        return next(stages for stages in STAGES if self._bytes(stages) <= limit)

    @property
    def _shared(self) -> int:
        """Bytes of shared memory of a block: sizeof(Memory)."""
        return self._bytes(self._stages)

    def _bytes(self, stages: int) -> int:
        turns, counts, barriers = 2 * 16, 2 * 4 * 4, 8 * (2 * stages + 4)
        return round_up(stages * self._stage_bytes + 2 * self.rows * PLACE_BYTES + turns + counts + barriers, ALIGNED)

    def _kernel(self) -> Kernel:
        return self.variant.load(
            "step.cu",
            threads=GROUP * (1 + self.rows // GROUP_ROWS),
            cluster=self.pair,
            cooperative=True,
            SIDES=1,
            ROWS=self.rows,
            UNITS=self.units,
            PAIR=self.pair,
            STAGES=self._stages,
            SHARED=self._shared,
            DIRECT=int(self.direct),
            X_FLOAT32=int(self.variant.data_float32),
            RESET_BEFORE=int(self.variant.vector > 0),
        )


class Meetings:
    """Words in which the blocks of a launch count their meetings: zero before a launch and after it.

    A launch takes the next two words, which are taken again long after it has ended. A launch that a CUDA graph captures keeps two words
    until its layer's weights are gone.
    """

    LAUNCHES, CAPTURED = 4096, 1 << 16

    def __init__(self, device: torch.device) -> None:
        """Raises ContractError during a capture: the words must be zero before a graph runs."""
        if torch.cuda.is_current_stream_capturing():
            raise ContractError("a layer must run once before a CUDA graph captures it")
        self._words = torch.zeros((self.LAUNCHES + self.CAPTURED, 2), dtype=torch.int32, device=device)
        self._next, self._free = count(), list(range(self.LAUNCHES, self.LAUNCHES + self.CAPTURED))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the words are zero for every stream

    def take(self, layer: Any) -> int:
        """Return the address of two words for a launch of a layer; raises ContractError if graphs have taken all."""
        if not torch.cuda.is_current_stream_capturing():
            index = next(self._next) % self.LAUNCHES
        elif self._free:
            index = self._free.pop()
            weakref.finalize(layer, self._free.append, index)
        else:
            raise ContractError(f"CUDA graphs have captured {self.CAPTURED} launches")
        return self._words.data_ptr() + index * self._words.stride(0) * self._words.element_size()


def meetings(device: torch.device) -> Meetings:
    """Return the words of a device."""
    with _LOCK:
        return _meetings(device)


_LOCK = Lock()


@cache
def _meetings(device: torch.device) -> Meetings:
    return Meetings(device)
