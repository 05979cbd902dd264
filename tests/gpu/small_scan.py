"""Small shapes through the CUDA kernels of the SRU and the QRNN, for a sanitizer that watches every access:
`python -m tests.gpu.small_scan`."""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each array an allocation of its own, so that its end is one

from kernels.contract import Outputs
from kernels.scan.launch import Shape
from tests.gpu.inputs import gates, in_shape, made, outputs, with_wrong_guesses
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, Given

SRU_1 = Form("sru", version=1, skip="columns")
SRU_2 = Form("sru", version=2, skip="block", tanh=True)
QRNN = Form("qrnn", pooling="fo", window=2)
SRU_OF_IDS = Form("sru", version=1, skip="none", ids=True)
QRNN_OF_IDS = Form("qrnn", pooling="ifo", window=2, ids=True)
WITHOUT_POOLS = Outputs(steps=True, last=True)
SHORT = [3, 0, 5, 1, 2, 2, 1, 4, 3, 2]
LONG = [150, 0, 40, 129]


def main() -> None:
    for form in (SRU_1, SRU_2, QRNN, SRU_OF_IDS, QRNN_OF_IDS):
        check(form, made(form, SHORT, 40), EVERYTHING, Shape(32))
    for form in (SRU_1, SRU_2, QRNN):
        check(form, gates(form, SHORT, 41), Outputs(last=True), Shape(64))
    for form in (SRU_1, QRNN, QRNN_OF_IDS):
        check(form, made(form, LONG, 40), WITHOUT_POOLS, Shape(32, ring=2))
    check(QRNN, gates(QRNN, LONG, 40), Outputs(last=True), Shape(32, ring=2))
    check(SRU_1, with_wrong_guesses(gates(SRU_1, [300], 40)), WITHOUT_POOLS, Shape(32, ring=2))


def check(form: Form, given: Given, want: Outputs, shape: Shape) -> None:
    with in_shape(shape):
        encoded = form.run(*given, want=want, backend="fused")
    assert all(bool(array.isfinite().all()) for array in outputs(encoded).values())


if __name__ == "__main__":
    main()
