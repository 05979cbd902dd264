"""Tests that compute-sanitizer, which checks every memory access of a kernel, finds nothing in kernels that run on small shapes.

It runs this file as a program: `python -m tests.gpu.test_sanitizer PART`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import pytest

from kernels.conv.plan import TileShape as ConvTile
from kernels.ragged import Outputs
from kernels.scan.shape import ScanShape, TileShape
from tests.gpu.cases import (
    CAUSAL,
    CENTRED,
    GRU,
    GRU_BEFORE,
    LSTM,
    OF_TABLES,
    OF_VECTORS,
    PEEPHOLES,
    PROJECTED,
    QRNN,
    QRNN_OF_IDS,
    SRU_1,
    SRU_2,
    SRU_OF_IDS,
    STRIDED,
    Case,
    blocks,
    layer,
    levels,
    texts,
)
from tests.gpu.inputs import FLOAT32, LAST, MAXIMUM, exactly, made, outputs
from tests.gpu.stacks import tcn
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING

SHORT, LONG = [3, 0, 5, 1, 2, 2, 1, 4, 3, 2], [150, 0, 40, 129]
Problem = tuple[Case, Sequence[int]]


def recurrent() -> Iterator[Problem]:
    for form in (LSTM, GRU):
        for backend, hidden in (("cluster", 41), ("cluster", 200), ("grid", 41), ("grid", 272), ("grid", 529)):
            yield layer(form, backend, hidden), SHORT
        yield layer(form, "cluster", 200, storage=FLOAT32), SHORT
    for backend in ("cluster", "grid"):
        yield layer(PEEPHOLES, backend, 40), SHORT


def two_products() -> Iterator[Problem]:
    for form in (GRU_BEFORE, PROJECTED):
        for backend, hidden in (("cluster", 41), ("cluster", 200), ("grid", 41), ("grid", 529)):
            yield layer(form, backend, hidden), SHORT


def several_levels() -> Iterator[Problem]:
    for form in (LSTM, GRU):
        for hidden, count, tile in ((64, 2, 16), (128, 3, 32)):
            yield levels(form, hidden, count, tile), [3, 0, 5, 1, 2, 2, 9, *[4] * 40]


def scans() -> Iterator[Problem]:
    for form in (SRU_1, SRU_2, QRNN, SRU_OF_IDS, QRNN_OF_IDS):
        yield layer(form, "fused", 40, shape=ScanShape(32), make=made), SHORT
    for form in (SRU_1, SRU_2, QRNN):
        yield layer(form, "fused", 41, shape=ScanShape(64), want=LAST), SHORT
    for form in (SRU_1, QRNN):
        for shape in (TileShape(8, 1), TileShape(32, 2), TileShape(16, 2, split=True)):
            yield layer(form, "fused", 40, shape=shape, want=LAST, make=made), LONG
        yield layer(form, "fused", 40, shape=ScanShape(32, split=True), want=LAST, make=made), [300]
    for form, make in ((SRU_1, exactly), (QRNN, exactly), (SRU_OF_IDS, made)):
        yield layer(form, "fused", 40, shape=TileShape(32, 2, split=True), want=LAST, make=make), LONG


def convolutions() -> Iterator[Problem]:
    forms: list[tuple[Form, Outputs]] = [(CENTRED, MAXIMUM), (CAUSAL, EVERYTHING), (STRIDED, EVERYTHING), (OF_VECTORS, MAXIMUM)]
    for shape, lengths in ((ConvTile(1, 32), SHORT), (ConvTile(2, 64), LONG)):
        for form, want in forms:
            yield layer(form, "fused", 41, shape=shape, want=want, make=partial(made, width=65)), lengths
        yield blocks(tcn, states=True)._replace(shape=shape), lengths
        yield blocks(tcn, states=False)._replace(shape=shape, want=LAST), lengths
    for lengths in (SHORT, LONG):
        yield layer(OF_TABLES, "fused", 41), lengths
        for ids in ("", "tables"):
            yield texts(ids), lengths


PARTS: dict[str, Callable[[], Iterator[Problem]]] = {
    part.__name__: part for part in (recurrent, two_products, several_levels, scans, convolutions)
}


def main(part: str) -> None:
    for case, lengths in PARTS[part]():
        arrays = outputs(case.made(lengths).encoded())
        assert arrays and all(bool(array.isfinite().all()) for array in arrays.values()), case


@pytest.mark.parametrize(
    "tool, part", [*product(["memcheck"], PARTS), *product(["racecheck"], [part for part in PARTS if part != "several_levels"])]
)
def test_sanitizer_reports_no_errors(tool: str, part: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.test_sanitizer", part]
    # One allocation for each array, so that accesses beyond its end are detected.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout or "0 hazards displayed" in run.stdout, run.stdout[-2000:]


if __name__ == "__main__":
    main(sys.argv[1])
