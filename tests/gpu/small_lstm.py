"""Runs both CUDA kernels of the LSTM on small shapes, under compute-sanitizer: `python -m tests.gpu.small_lstm`."""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = (
    "1"  # one allocation for each array, so that accesses beyond its end are detected
)

from tests.gpu.inputs import LSTM, gated, outputs

SHAPES = [("cluster", 40), ("cluster", 200), ("grid", 40), ("grid", 272), ("grid", 528)]


def main() -> None:
    for backend, hidden in SHAPES:
        encoded = LSTM.run(*gated([3, 0, 5, 1, 2, 2, 1, 4, 3, 2], hidden), backend=backend)
        assert all(bool(array.isfinite().all()) for array in outputs(encoded).values())


if __name__ == "__main__":
    main()
