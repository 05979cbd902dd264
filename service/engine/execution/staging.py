"""Host buffers in which the chunks of a batch are packed end to end. They are allocated once, so nothing here grows with the load.

Each batch that may be in flight has a host buffer, so the next batch is staged while the previous batch is still copied. On a GPU the host
buffers are pinned, and one copy moves offsets, state slots and data to a device buffer.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.launching import round_up
from kernels.ragged import Ragged
from service.engine.batch import Batch
from service.engine.batching.state_slots import DISCARD_SLOT, ZERO_SLOT
from service.engine.execution.device import Copy
from service.ipc.messages import FEATURES, IDS
from service.modeling.state_slabs import RowSlots

ALIGNED_BYTES = 256
"""Alignment of the data behind the offsets: kernels read wide pieces."""
JOINED_BYTES = 1 << 16
"""Up to this size the chunks are joined before they are copied to the buffer: a large copy is faster than many small copies."""


class Staging:
    """The buffers of one model, for batches of up to `rows` chunks and `tokens` tokens. in_flight: the number of host buffers."""

    def __init__(self, rows: int, tokens: int, features: int | None, device: torch.device, in_flight: int = 1) -> None:
        self._dtype = torch.int32 if features is None else torch.float32
        self._columns: tuple[int, ...] = () if features is None else (features,)
        self.step_bytes = 4 * (features or 1)
        self._rows = rows
        self._begin = round_up(4 * (3 * rows + 1), ALIGNED_BYTES)
        size, on_gpu = self._begin + tokens * self.step_bytes, device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(in_flight)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else None
        heads = [buffer.numpy()[: 4 * (3 * rows + 1)].view(np.int32) for buffer in self._host]
        self._offsets, self._read_slots, self._write_slots = zip(
            *(np.split(head, (rows + 1, 2 * rows + 1)) for head in heads), strict=True
        )
        self._data = [buffer.numpy()[self._begin :].data for buffer in self._host]

    def stage(self, batch: Batch, buffer: int = 0, rows: int = 0) -> list[int]:
        """Pack the chunks of a batch into a host buffer, with empty rows behind them up to `rows`. Returns where each chunk ends."""
        rows = max(rows, batch.rows)
        ends = list(accumulate(chunk.steps for chunk in batch.chunks))
        needed, size = ends[-1] * self.step_bytes, sum([len(chunk.data) for chunk in batch.chunks])
        if size != needed:
            raise ValueError(
                f"{batch.rows} chunks have {size} bytes, different from {ends[-1]} steps of {self.step_bytes} bytes"
            )
        target = self._data[buffer]
        if needed <= JOINED_BYTES:
            target[:needed] = b"".join([chunk.data for chunk in batch.chunks])
        else:
            for begin, end, chunk in zip([0, *ends], ends, batch.chunks, strict=False):
                target[begin * self.step_bytes : end * self.step_bytes] = chunk.data
        self._offsets[buffer][1 : batch.rows + 1] = ends
        self._offsets[buffer][batch.rows + 1 : rows + 1] = ends[-1]
        self._read_slots[buffer][:rows], self._write_slots[buffer][:rows] = ZERO_SLOT, DISCARD_SLOT
        if not batch.whole:
            self._read_slots[buffer][: batch.rows] = [chunk.read_slot for chunk in batch.chunks]
            self._write_slots[buffer][: batch.rows] = [chunk.write_slot for chunk in batch.chunks]
        return ends

    def ragged(self, rows: int, tokens: int) -> Ragged:
        """Return the staged batch as the encoder reads it: on the device after its copy, else in the first host buffer."""
        buffer = self._encoder_buffer()
        data = buffer[self._begin : self._begin + tokens * self.step_bytes].view(self._dtype)
        return Ragged(data.view(tokens, *self._columns), buffer[: 4 * (rows + 1)].view(torch.int32))

    def row_slots(self, rows: int) -> RowSlots:
        """Return the state slots that the rows of the staged batch read and write, in the same buffer."""
        numbers = self._encoder_buffer()[: 4 * (3 * self._rows + 1)].view(torch.int32)
        read_slots, write_slots = numbers[self._rows + 1 : 2 * self._rows + 1], numbers[2 * self._rows + 1 :]
        return RowSlots(read_slots[:rows], write_slots[:rows])

    def copy(self, tokens: int, stream: int, buffer: int = 0) -> Copy:
        """Return the copy of a host buffer with `tokens` tokens to the device, on this stream."""
        assert self._device is not None
        end = self._begin + tokens * self.step_bytes
        return Copy(self._device[:end], self._host[buffer][:end], stream)

    def _encoder_buffer(self) -> Tensor:
        return self._host[0] if self._device is None else self._device


assert (IDS, FEATURES) == ("int32", "float32"), "Staging counts on four bytes per value"
