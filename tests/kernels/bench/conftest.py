"""A bench that takes no time, and workloads that are small enough for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.bench.baselines.baseline import Peer
from kernels.bench.convolutions import IDS_FORMS
from kernels.bench.measure import Bench, Findings
from kernels.bench.workload import EMBEDDED, FORMS, LONG_MEMORY, STACKS, Workload

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """The bench sets torch's threads and switches for the whole process."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def tiny(family: str, kind: str = "layer", lengths: str = "questions", rows: int = 3, form: str | None = None) -> Workload:
    """Hidden sizes that three filter widths divide; of forms, the one that is timed where one is enough."""
    usual = FORMS[family][-1] if family in FORMS else {"dense-conv": "width 5", "text-cnn-ids": EMBEDDED}.get(kind, "")
    return Workload(family, rows, 7, 6, 6, lengths=lengths, kind=kind, form=usual if form is None else form)


OVER_VECTORS = [
    tiny("conv", kind, lengths, form=form)
    for kind, form in (("text-cnn", None), ("dense-conv", "width 3"), ("dense-conv", "width 5"))
    for lengths in ("equal", "questions")
]
"""Convolutions that every strategy takes."""

TINY = [
    *(tiny(family, lengths=lengths) for family in ("lstm", "gru", "sru", "qrnn") for lengths in ("equal", "questions")),
    *OVER_VECTORS,
    *(tiny("conv", "text-cnn-ids", lengths, form=form) for form in IDS_FORMS for lengths in ("equal", "questions")),
    *(tiny("conv", kind, lengths) for kind in STACKS for lengths in ("equal", "questions")),
]

RECURRENCE = Workload("lstm", 3, 7, 24, 6, lengths="questions", kind="recurrence")
"""Its data are gate inputs: four blocks of the hidden size."""

FORMED = [
    *(tiny(family, form=form) for family, form in (("sru", "v1"), ("sru", LONG_MEMORY), ("qrnn", "window 1"))),
    *(tiny(family, "folded", form=form) for family in FORMS for form in FORMS[family]),
    *(tiny("sru", "every-step", lengths="equal", form=form) for form in FORMS["sru"]),
]
"""What only a GPU's runs hold, for our own backends."""


def measured(workload: Workload, *peers: Peer) -> Findings:
    return Bench(CPU, peers, budget_s=0.0, say=_nothing).measured([workload])


def _nothing(line: str) -> None:
    """Nobody waits for a test's progress."""
