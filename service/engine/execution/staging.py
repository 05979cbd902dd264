"""Chunks laid end to end in buffers that are made once: no allocation that grows with the load.

Each turn that may be in flight has a place of its own on the host, so that the next turn is laid while the last one is still copied.
On a GPU the places are pinned, and one buffer on the device takes offsets and data in one copy.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.contract import Ragged
from kernels.launching import round_up
from service.engine.batch import Batch
from service.engine.execution.device import Copy
from service.ipc.messages import FEATURES, IDS, SCRAP, ZEROS
from service.modeling.memory import Places

ALIGNED_BYTES = 256
"""Where the data begin, after the offsets: kernels read them in wide pieces."""
JOINED_BYTES = 1 << 16
"""So many are joined first: copying them twice takes less than laying each chunk by itself."""


class Staging:
    """Buffers for one model's turns of at most `rows` chunks and `tokens` steps, of which `places` may be in flight."""

    def __init__(self, rows: int, tokens: int, features: int | None, device: torch.device, places: int = 1) -> None:
        self._dtype = torch.int32 if features is None else torch.float32
        self._columns: tuple[int, ...] = () if features is None else (features,)
        self.step_bytes = 4 * (features or 1)
        self._rows = rows
        self._begin = round_up(4 * (3 * rows + 1), ALIGNED_BYTES)
        size, on_gpu = self._begin + tokens * self.step_bytes, device.type == "cuda"
        self._places = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(places)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else None
        heads = [place.numpy()[: 4 * (3 * rows + 1)].view(np.int32) for place in self._places]
        self._offsets, self._sources, self._slots = zip(
            *(np.split(head, (rows + 1, 2 * rows + 1)) for head in heads), strict=True
        )
        self._data = [place.numpy()[self._begin :].data for place in self._places]

    def lay(self, batch: Batch, place: int = 0, rows: int = 0) -> list[int]:
        """The turn's chunks into a place on the host, and empty rows after them up to `rows`. Returns where each chunk ends."""
        rows = max(rows, batch.rows)
        ends = list(accumulate(chunk.steps for chunk in batch.chunks))
        needed, found = ends[-1] * self.step_bytes, sum([len(chunk.data) for chunk in batch.chunks])
        if found != needed:
            raise ValueError(f"{batch.rows} chunks have {found} bytes, different from {ends[-1]} steps of {self.step_bytes}")
        target = self._data[place]
        if needed <= JOINED_BYTES:
            target[:needed] = b"".join([chunk.data for chunk in batch.chunks])
        else:
            for begin, end, chunk in zip([0, *ends], ends, batch.chunks, strict=False):
                target[begin * self.step_bytes : end * self.step_bytes] = chunk.data
        self._offsets[place][1 : batch.rows + 1] = ends
        self._offsets[place][batch.rows + 1 : rows + 1] = ends[-1]
        self._sources[place][:rows], self._slots[place][:rows] = ZEROS, SCRAP
        if not batch.whole:
            self._sources[place][: batch.rows] = [chunk.source for chunk in batch.chunks]
            self._slots[place][: batch.rows] = [chunk.slot for chunk in batch.chunks]
        return ends

    def ragged(self, rows: int, tokens: int, place: int = 0) -> Ragged:
        """What was laid, where the encoder reads it: on the device, once it has been copied there."""
        buffer = self._buffer(place)
        data = buffer[self._begin : self._begin + tokens * self.step_bytes].view(self._dtype)
        return Ragged(data.view(tokens, *self._columns), buffer[: 4 * (rows + 1)].view(torch.int32))

    def places(self, rows: int, place: int = 0) -> Places:
        """From where the rows of what was laid go on, and where they are kept; in the same buffer."""
        numbers = self._buffer(place)[: 4 * (3 * self._rows + 1)].view(torch.int32)
        sources, slots = numbers[self._rows + 1 : 2 * self._rows + 1], numbers[2 * self._rows + 1 :]
        return Places(sources[:rows], slots[:rows])

    def copy(self, tokens: int, stream: int, place: int = 0) -> Copy:
        """What was laid, of so many steps, to the device, on this stream."""
        assert self._device is not None
        end = self._begin + tokens * self.step_bytes
        return Copy(self._device[:end], self._places[place][:end], stream)

    def _buffer(self, place: int) -> Tensor:
        return self._places[place] if self._device is None else self._device


assert (IDS, FEATURES) == ("int32", "float32"), "what travels has four bytes a value"
