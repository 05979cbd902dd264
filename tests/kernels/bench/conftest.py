"""Small workloads, and a bench without a time budget."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch

from kernels.bench import goals
from kernels.bench.baselines.baseline import Baseline
from kernels.bench.convolutions import IDS_FORMS
from kernels.bench.goals import on_cuda
from kernels.bench.goals.evaluation import Goal
from kernels.bench.measure import Bench, Findings
from kernels.bench.report import Measurement
from kernels.bench.timing import Spread
from kernels.bench.workload import EMBEDDED, ENCODER, FORMS, LONG_MEMORY, STACKS, Workload

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restore_torch_settings() -> Iterator[None]:
    """Restore torch's settings, which the bench changes for the whole process."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def tiny(family: str, kind: str = "layer", lengths: str = "questions", rows: int = 3, form: str | None = None) -> Workload:
    """Return a workload whose hidden size is a multiple of three filter widths."""
    usual = FORMS[family][-1] if family in FORMS else {"dense-conv": "width 5", "text-cnn-ids": EMBEDDED}.get(kind, "")
    return Workload(family, rows, 7, 6, 6, lengths=lengths, kind=kind, form=usual if form is None else form)


OVER_VECTORS = [
    tiny("conv", kind, lengths, form=form)
    for kind, form in (("text-cnn", None), ("dense-conv", "width 3"), ("dense-conv", "width 5"))
    for lengths in ("equal", "questions")
]
"""Convolutions that every strategy supports."""

TINY = [
    *(tiny(family, lengths=lengths) for family in ("lstm", "gru", "sru", "qrnn") for lengths in ("equal", "questions")),
    *OVER_VECTORS,
    *(tiny("conv", "text-cnn-ids", lengths, form=form) for form in IDS_FORMS for lengths in ("equal", "questions")),
    *(tiny("conv", kind, lengths) for kind in STACKS for lengths in ("equal", "questions")),
]

RECURRENCE = Workload("lstm", 3, 7, 24, 6, lengths="questions", kind="recurrence")
"""A workload over gate inputs: four blocks of the hidden size."""

FORMED = [
    *(tiny(family, form=form) for family, form in (("sru", "v1"), ("sru", LONG_MEMORY), ("qrnn", "window 1"))),
    *(tiny(family, "folded", form=form) for family in FORMS for form in FORMS[family]),
    *(tiny("sru", "every-step", lengths="equal", form=form) for form in FORMS["sru"]),
]
"""Workloads of our backends that only runs on a GPU contain."""

ENCODERS = [
    Workload(family, 3, 7, 5, 6, lengths=lengths, kind=ENCODER, depth=depth, directions=directions)
    for family in ("lstm", "gru")
    for lengths, depth, directions in (("equal", 2, 2), ("equal", 3, 1), ("questions", 3, 1), ("equal", 1, 2))
]
"""Several layers, or both directions."""


def measured(workload: Workload, *baselines: Baseline) -> Findings:
    return Bench(CPU, baselines, budget_s=0.0, progress=lambda _: None).measured([workload])


def timed(workload: Workload, backend: str, median_us: float, timing: str = "kernel") -> Measurement:
    """Return a measurement with this median and no spread."""
    return Measurement(workload, backend, timing, Spread(median_us, median_us, median_us, 20), 0.0)


def judged(
    measurements: Iterable[Measurement], backends: Sequence[str], judging: Sequence[Goal] = on_cuda.GOALS
) -> tuple[dict[str, str], list[list[list[str]]]]:
    """Return the measured value, the limit and the verdict of each goal by its name, and the cells of the grids."""
    table = goals.table(judging, measurements, backends)
    lines, *grids = ([re.split(" {2,}", line) for line in part.splitlines()] for part in table.split("\n\n"))
    return {name: " ".join(cells) for name, *cells in lines[1:]}, grids
