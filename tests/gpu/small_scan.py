"""Runs the CUDA kernels of the SRU and the QRNN on small shapes, under compute-sanitizer: `python -m tests.gpu.small_scan`."""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = (
    "1"  # one allocation for each array, so that accesses beyond its end are detected
)

from kernels.ragged import Outputs
from kernels.scan.shape import ScanShape, TileShape
from tests.gpu.inputs import gates, in_shape, made, outputs
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, Arguments

SRU_1 = Form("sru", version=1, skip="columns")
SRU_2 = Form("sru", version=2, skip="block", tanh=True)
QRNN = Form("qrnn", pooling="fo", window=2)
SRU_OF_IDS = Form("sru", version=1, skip="none", ids=True)
QRNN_OF_IDS = Form("qrnn", pooling="ifo", window=2, ids=True)
LAST = Outputs(last=True)
SHORT = [3, 0, 5, 1, 2, 2, 1, 4, 3, 2]
LONG = [150, 0, 40, 129]


def main() -> None:
    for form in (SRU_1, SRU_2, QRNN, SRU_OF_IDS, QRNN_OF_IDS):
        check(form, made(form, SHORT, 40), EVERYTHING, ScanShape(32))
    for form in (SRU_1, SRU_2, QRNN):
        check(form, gates(form, SHORT, 41), LAST, ScanShape(64))
    for form in (SRU_1, QRNN):
        for shape in (TileShape(8, 1), TileShape(32, 2), TileShape(16, 2, split=True)):
            check(form, made(form, LONG, 40), LAST, shape)
        check(form, made(form, [300], 40), LAST, ScanShape(32, split=True))
        check(form, gates(form, LONG, 40), LAST, TileShape(32, 2, split=True))
    check(SRU_OF_IDS, made(SRU_OF_IDS, LONG, 40), LAST, TileShape(32, 2, split=True))


def check(form: Form, arguments: Arguments, want: Outputs, shape: ScanShape | TileShape) -> None:
    with in_shape(shape):
        encoded = form.run(*arguments, want=want, backend="fused")
    assert all(bool(array.isfinite().all()) for array in outputs(encoded).values())


if __name__ == "__main__":
    main()
