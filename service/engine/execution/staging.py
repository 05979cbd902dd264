"""Host buffers in which the blocks of a batch are packed end to end. They are allocated once: nothing here grows with the load.

Each batch that may be in flight has a host buffer, so the next batch is staged while the previous batch is still copied. On a GPU the host
buffers are pinned, and one copy moves offsets, state slots and data to a device buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.launching import round_up
from kernels.ragged import Ragged
from service.engine.batch import Batch, rows_block
from service.engine.batching.state_slots import DISCARD_SLOT, ZERO_SLOT
from service.engine.execution.device import Copy
from service.ipc.blocks import Buffer
from service.ipc.messages.inference import FEATURES, IDS
from service.ipc.messages.models import ModelKey
from service.modeling.state_slabs import RowSlots

ALIGNED_BYTES = 256
"""Alignment of the data behind the offsets: kernels read wide pieces."""
JOINED_BYTES = 1 << 16
"""Up to this size the parts of a batch are joined before they are copied to the buffer: a large copy is faster than many small copies."""
PARALLEL_BYTES = 1 << 20
"""From this size on, torch copies a part in several threads: a single thread takes longer than the copy to the device."""
VALUES_OF, LENGTHS_OF = attrgetter("columns.values"), attrgetter("columns.lengths")


def write_offsets(batch: Batch, offsets: NDArray[np.int32]) -> None:
    """Write where each row of a batch ends to `offsets`, (batch rows + 1 or more,), whose first entry is 0."""
    np.frombuffer(b"".join(map(LENGTHS_OF, batch.blocks)), np.int32).cumsum(out=offsets[1 : batch.rows + 1])


class Staging:
    """The buffers of one model, for batches of up to `rows` rows and `tokens` tokens. in_flight: the number of host buffers."""

    def __init__(self, rows: int, tokens: int, features: int | None, device: torch.device, in_flight: int = 1) -> None:
        self._dtype = torch.int32 if features is None else torch.float32
        self._columns: tuple[int, ...] = () if features is None else (features,)
        self.step_bytes = 4 * (features or 1)
        self._rows = rows
        self._begin = round_up(4 * (3 * rows + 1), ALIGNED_BYTES)
        size, on_gpu = self._begin + tokens * self.step_bytes, device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(in_flight)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else None
        self._encoder_buffer = self._host[0] if self._device is None else self._device
        heads = [buffer.numpy()[: 4 * (3 * rows + 1)].view(np.int32) for buffer in self._host]
        self._offsets, self._read_slots, self._write_slots = zip(
            *(np.split(head, (rows + 1, 2 * rows + 1)) for head in heads), strict=True
        )
        for read_slots, write_slots in zip(self._read_slots, self._write_slots, strict=True):
            read_slots[:], write_slots[:] = ZERO_SLOT, DISCARD_SLOT
        self._rows_with_slots = [0] * in_flight
        """Rows of each buffer that may have slots of the batch before."""
        self._data = [buffer.numpy()[self._begin :].data for buffer in self._host]

    def stage(self, batch: Batch, buffer: int = 0, rows: int = 0) -> NDArray[np.int32]:
        """Pack a batch into a host buffer, with empty rows behind it up to `rows`.

        Returns (batch rows + 1,) where each row begins, in the buffer: it is overwritten with the next batch.
        """
        rows, tokens = max(rows, batch.rows), batch.tokens
        parts = list[Buffer](map(VALUES_OF, batch.blocks))
        needed, size = tokens * self.step_bytes, sum(map(len, parts))
        if size != needed:
            raise ValueError(
                f"{batch.rows} sequences have {size} bytes, different from {tokens} steps of {self.step_bytes} bytes"
            )
        target, begin = self._data[buffer], 0
        for part in parts if needed > JOINED_BYTES else [b"".join(parts)]:
            end = begin + len(part)
            if len(part) < PARALLEL_BYTES:
                target[begin:end] = part
            else:
                self._host[buffer][self._begin + begin : self._begin + end].copy_(_as_tensor(part))
            begin = end
        offsets = self._offsets[buffer]
        write_offsets(batch, offsets)
        offsets[batch.rows + 1 : rows + 1] = tokens
        used, reads, writes = self._rows_with_slots[buffer], self._read_slots[buffer], self._write_slots[buffer]
        if used:
            reads[:used], writes[:used] = ZERO_SLOT, DISCARD_SLOT
        self._rows_with_slots[buffer] = 0 if batch.whole else batch.rows
        if not batch.whole:
            reads[: batch.rows], writes[: batch.rows] = batch.read_slots, batch.write_slots
        begins: NDArray[np.int32] = offsets[: batch.rows + 1]
        return begins

    def stage_zeros(self, lengths: Sequence[int], rows: int = 0) -> None:
        """Stage rows of zeros with these lengths, and empty rows behind them up to `rows`."""
        model = ModelKey("", "")
        self.stage(Batch(model, [rows_block(model, lengths, bytes(sum(lengths) * self.step_bytes))]), rows=rows)

    def ragged(self, rows: int, tokens: int) -> Ragged:
        """Return the staged batch as the encoder reads it: on the device after its copy, else in the first host buffer."""
        buffer = self._encoder_buffer
        data = buffer[self._begin : self._begin + tokens * self.step_bytes].view(self._dtype)
        return Ragged(data.view(tokens, *self._columns), buffer[: 4 * (rows + 1)].view(torch.int32))

    def row_slots(self, rows: int) -> RowSlots:
        """Return the state slots that the rows of the staged batch read and write, in the same buffer."""
        numbers = self._encoder_buffer[: 4 * (3 * self._rows + 1)].view(torch.int32)
        read_slots, write_slots = numbers[self._rows + 1 : 2 * self._rows + 1], numbers[2 * self._rows + 1 :]
        return RowSlots(read_slots[:rows], write_slots[:rows])

    def copy(self, tokens: int, buffer: int = 0) -> Copy:
        """Return the copy of a host buffer with `tokens` tokens to the device."""
        assert self._device is not None
        end = self._begin + tokens * self.step_bytes
        return Copy(self._device[:end], self._host[buffer][:end])


def _as_tensor(part: Buffer) -> Tensor:
    """Return the bytes of a part as a tensor that shares their memory, for reading only."""
    address, _ = np.frombuffer(part, np.uint8).__array_interface__["data"]
    return torch.frombuffer((ctypes.c_ubyte * len(part)).from_address(address), dtype=torch.uint8)


assert (IDS, FEATURES) == ("int32", "float32"), "Staging counts on four bytes per value"
