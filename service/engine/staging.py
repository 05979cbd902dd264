"""Chunks laid end to end in buffers that are made once: no allocation that grows with the load."""

from __future__ import annotations

import numpy as np
import torch

from kernels.contract import Ragged
from service.engine.turn import Turn
from service.sequence import FEATURES, IDS


class Staging:
    """Host buffers for one model's turns of at most `rows` chunks and `tokens` steps."""

    def __init__(self, rows: int, tokens: int, features: int | None, device: torch.device) -> None:
        shape, dtype = ((tokens,), IDS) if features is None else ((tokens, features), FEATURES)
        self._data = np.zeros(shape, dtype)
        self._bytes = self._data.data.cast("B")
        self._offsets = np.zeros(rows + 1, np.int32)
        self._step_bytes = self._data[0].nbytes
        self._device = device

    def lay(self, turn: Turn) -> Ragged:
        """The turn's chunks as one ragged batch on the device; valid until the next call."""
        token = 0
        for row, chunk in enumerate(turn.chunks, start=1):
            end = token + chunk.steps
            self._bytes[token * self._step_bytes : end * self._step_bytes] = memoryview(chunk.data).cast("B")
            self._offsets[row] = token = end
        data, offsets = torch.from_numpy(self._data[:token]), torch.from_numpy(self._offsets[: turn.rows + 1])
        return Ragged(data.to(self._device), offsets.to(self._device))
