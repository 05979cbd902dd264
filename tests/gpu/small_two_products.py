"""Runs the CUDA kernel for two dependent products in each step on small shapes, under compute-sanitizer:
`python -m tests.gpu.small_two_products`."""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = (
    "1"  # one allocation for each array, so that accesses beyond its end are detected
)

from tests.gpu.inputs import gates, outputs
from tests.kernels.families import Form

FORMS = [Form("gru", reset="before"), Form("lstm", projection=True, peepholes=True)]
SHAPES = [("cluster", 41), ("cluster", 200), ("grid", 41), ("grid", 529)]


def main() -> None:
    for form in FORMS:
        for backend, hidden in SHAPES:
            encoded = form.run(*gates(form, [3, 0, 5, 1, 2, 2, 1, 4, 3, 2], hidden), backend=backend)
            assert all(bool(array.isfinite().all()) for array in outputs(encoded).values())


if __name__ == "__main__":
    main()
