"""Runs several levels of small layers in one launch, under compute-sanitizer: `python -m tests.gpu.small_levels`."""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = (
    "1"  # one allocation for each array, so that accesses beyond its end are detected
)

from tests.gpu.inputs import outputs
from tests.gpu.test_levels import GRU, LSTM, made_levels, together


def main() -> None:
    for form in (LSTM, GRU):
        for hidden, levels, tile in ((64, 2, 16), (128, 3, 32)):
            with together(tile):
                encoded = form.levels(*made_levels(form, [3, 0, 5, 1, 2, 2, 9, *[4] * 40], hidden, levels))
            assert all(bool(array.isfinite().all()) for array in outputs(encoded).values())


if __name__ == "__main__":
    main()
