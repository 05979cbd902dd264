"""Runs both CUDA kernels of the GRU, of the LSTM with peepholes, and of float32 on small shapes, under compute-sanitizer:
`python -m tests.gpu.small_gru`."""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = (
    "1"  # one allocation for each array, so that accesses beyond its end are detected
)

import torch

from tests.gpu.inputs import gates, outputs
from tests.kernels.families import Form

GRU, PEEPHOLES = Form("gru", reset="after"), Form("lstm", peepholes=True)
SHAPES = [
    *(
        (GRU, backend, hidden)
        for backend, hidden in (("cluster", 41), ("cluster", 200), ("grid", 41), ("grid", 272), ("grid", 529))
    ),
    *((PEEPHOLES, backend, 40) for backend in ("cluster", "grid")),
]


def main() -> None:
    for form in (GRU, Form("lstm")):
        encoded = form.run(*gates(form, [3, 0, 5, 1, 2, 2, 1, 4, 3, 2], 200, storage=torch.float32), backend="cluster")
        assert all(bool(array.isfinite().all()) for array in outputs(encoded).values())
    for form, backend, hidden in SHAPES:
        encoded = form.run(*gates(form, [3, 0, 5, 1, 2, 2, 1, 4, 3, 2], hidden), backend=backend)
        assert all(bool(array.isfinite().all()) for array in outputs(encoded).values())


if __name__ == "__main__":
    main()
