"""Tests that compute-sanitizer, which checks every memory access of a kernel, finds nothing in kernels that run on small shapes.

It runs this file as a program: `python -m tests.gpu.test_sanitizer PART`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest

from kernels.conv.plan import ConvTile as ConvTile
from kernels.scan.shape import ScanShape, TileShape
from tests.gpu import cases
from tests.gpu.cases import Case, layer
from tests.gpu.comparisons import outputs
from tests.gpu.inputs import FLOAT32, LAST, MAXIMUM, exactly, made
from tests.gpu.stacks import tcn
from tests.kernels.inputs import EVERYTHING

pytestmark = pytest.mark.slow

SHORT, LONG = [3, 0, 5, 1, 2, 2, 1, 4, 3, 2], [150, 0, 40, 129]
SIZES = (("cluster", 41), ("cluster", 200), ("grid", 41), ("grid", 272), ("grid", 529))
TILES = (TileShape(8, 1), TileShape(32, 2), TileShape(16, 2, split=True))
scan = partial(layer, backend="fused", hidden=40, want=LAST, make=made)
conv = partial(layer, backend="fused", hidden=41, make=partial(made, width=65))
Problem = tuple[Case, Sequence[int]]
PARTS: dict[str, list[Problem]] = {
    "recurrent": [
        *((layer(form, *size), SHORT) for form in (cases.LSTM, cases.GRU) for size in SIZES),
        *((layer(form, "cluster", 200, storage=FLOAT32), SHORT) for form in (cases.LSTM, cases.GRU)),
        *((layer(cases.PEEPHOLES, backend, 40), SHORT) for backend in ("cluster", "grid")),
    ],
    "two-products": [(layer(form, *size), SHORT) for form in cases.TWO_PRODUCTS[:2] for size in SIZES],
    "levels": [
        (cases.levels(form, *sizes), [3, 0, 5, 1, 2, 2, 9, *[4] * 40])
        for form in (cases.LSTM, cases.GRU)
        for sizes in ((64, 2, 16), (128, 3, 32))
    ],
    "scans": [
        *((scan(form, shape=ScanShape(32), want=EVERYTHING), SHORT) for form in cases.SCANS),
        *((scan(form, hidden=41, shape=ScanShape(64), make=exactly), SHORT) for form in cases.SCANS[:3]),
        *((scan(form, shape=shape), LONG) for form in (cases.SRU_1, cases.QRNN) for shape in TILES),
        *((scan(form, shape=ScanShape(32, split=True)), [300]) for form in (cases.SRU_1, cases.QRNN)),
        *((scan(form, shape=TILES[2], make=exactly), LONG) for form in (cases.SRU_1, cases.QRNN, cases.SRU_OF_IDS)),
    ],
    "convolutions": [
        *(
            problem
            for shape, lengths in ((ConvTile(1, 32), SHORT), (ConvTile(2, 64), LONG))
            for problem in (
                (conv(cases.CENTRED, shape=shape, want=MAXIMUM), lengths),
                (conv(cases.CAUSAL, shape=shape), lengths),
                (conv(cases.STRIDED, shape=shape), lengths),
                (conv(cases.OF_VECTORS, shape=shape, want=MAXIMUM), lengths),
                (cases.blocks(tcn, states=True)._replace(shape=shape), lengths),
                (cases.blocks(tcn, states=False)._replace(shape=shape, want=LAST), lengths),
            )
        ),
        *(
            (case, lengths)
            for lengths in (SHORT, LONG)
            for case in (conv(cases.OF_TABLES), cases.texts(""), cases.texts("tables"))
        ),
    ],
}


def main(part: str) -> None:
    for case, lengths in PARTS[part]:
        arrays = outputs(case.made(lengths).encoded())
        assert arrays and all(bool(array.isfinite().all()) for array in arrays.values()), case


@pytest.mark.parametrize(
    "tool, part", [*product(["memcheck"], PARTS), *product(["racecheck"], [part for part in PARTS if part != "levels"])]
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
