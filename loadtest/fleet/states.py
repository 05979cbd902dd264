"""The bytes that move with a session: the file of `GET /sessions/{id}/state`, for the models of the simulation."""

from __future__ import annotations

import torch

from service.engine.batching.session_state import pack
from service.ipc.session_file import Origin

ORIGIN = Origin("a-model-with-a-name", "1", 64 * "0", 1000)
LSTMS = {"LSTM of 64 units": (64, 1), "LSTM of 512 units": (512, 1), "4 LSTM layers of 1024 units": (1024, 4)}
"""Units and layers. The first is the size of `sensor-forecast`."""


def lstm_file_bytes(units: int, layers: int) -> int:
    """Return the size of the file of a session with an LSTM."""
    state = {f"{layer}.0.{array}": torch.zeros(units) for layer in range(layers) for array in ("hidden", "cell")}
    return len(pack(state, ORIGIN))


def file_bytes() -> dict[str, int]:
    """Return the size of the file by model."""
    return {name: lstm_file_bytes(units, layers) for name, (units, layers) in LSTMS.items()}
