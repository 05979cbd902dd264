"""Workloads of every family on each kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from kernels import backend
from kernels.bench import convolutions
from kernels.bench.workload import ENCODER, FORMS, INT8, LONG_MEMORY, NEXT_STEPS, VOCABULARY, Workload

STEPS = 64

FAMILIES = tuple(family for family in backend.FAMILIES if family != "rnn")
"""The families with kernels in this project. The plain RNN runs in the framework only."""

FOLDED_FORMS = FORMS | {"qrnn": FORMS["qrnn"][:1]}
"""Forms that are also timed over token ids on a GPU, as first layers. A CPU runs the last of them, and every other family."""

RECURRENCE_STEPS = (STEPS, 320)
"""Two lengths, which separate the time of a step from the fixed time of a call."""

SESSION_UNITS, SESSIONS, CHUNK_STEPS = (128, 256, 512, 1024), (64, 512, 2048, 8192), {"cpu": (1, 4), "cuda": (1, 2, 4)}
"""Hidden units and rows of the next chunks of live streams, and their steps by device."""


def workloads(family: str, device: str, quick: bool) -> list[Workload]:
    """Return the workloads of a family. device: cpu or cuda; `quick` excludes the large sizes."""
    if family == "conv":
        return list(convolutions.on_cpu(quick) if device == "cpu" else convolutions.on_cuda(quick))
    if device == "cpu":
        return list(_recurrent_on_cpu(family, quick))
    return list(_grid_on_cuda(family, quick) if family in FORMS else _recurrent_on_cuda(family, quick))


def in_figure(workload: Workload) -> bool:
    """Whether a workload is in the speed figure of Lei et al. 2018, where a layer returns every step."""
    return workload.kind == "every-step"


def one_long_row(workload: Workload) -> bool:
    size = workload.rows, workload.steps, workload.hidden
    return workload.in_grid and workload.kind == "layer" and size == (1, 4096, 512)


def _square(family: str, rows: int, hidden: int, **others: Any) -> Workload:
    return Workload(family, rows, STEPS, hidden, hidden, **others)


def _usual(family: str) -> str:
    """Return the form for workloads with a single form."""
    return FORMS[family][-1] if family in FORMS else ""


def _recurrent_on_cpu(family: str, quick: bool) -> Iterator[Workload]:
    for hidden, rows, lengths in product((128, 256) if quick else (128, 256, 512), (1, 8, 32), ("equal", "questions")):
        yield _square(family, rows, hidden, lengths=lengths, form=_usual(family))
        yield _folded(family, rows, STEPS, hidden, FOLDED_FORMS.get(family, ("",))[-1], lengths=lengths)
    if family not in FORMS:
        if not quick:
            yield _square(family, 1, 512, dtype="bfloat16")
        # More states would take a CPU seconds.
        yield from (cell for cell in next_steps(family, "float32", "cpu", quick) if cell.rows * cell.hidden <= 2048 * 512)
    for hidden, rows in product((256,) if quick else (128, 256, 512), (1, 8, 32)):
        yield _square(family, rows, hidden, dtype=INT8, form=_usual(family))


_GRID_ON_CUDA = {
    # Hidden sizes, rows, steps.
    **dict.fromkeys(("lstm", "gru"), ((128, 256, 512, 768, 1024, 2048), (1, 8, 32, 64, 256), (STEPS,))),
    "sru": ((256, 512, 1024), (1, 32, 256), (32, 128, 1024, 4096)),
}
_SCAN_ON_CUDA = (256, 512, 1024), (1, 32, 256), (32, 128, 4096)
"""Of the other families with FORMS, and of folded layers."""
_FLOAT32_ON_CUDA = (128, 256, 512), (1, 8, 32, 64)
"""Hidden sizes and rows of an LSTM and a GRU."""
_FIGURE_ON_CUDA = (256, 512), (32,), (32, 128)
_COPIED = 1 << 20
"""Steps of 512 float16 columns: 1 GiB, which no cache holds."""
_QUESTIONS_ON_CUDA, _LSTM_QUESTIONS_ON_CUDA = ((256, 512), (32,)), ((128, 256, 512), (8, 32, 64))
"""Hidden sizes and rows."""


def deep(family: str, dtype: str) -> Workload:
    """Return four levels of the size that Appleyard et al. 2016 optimise step by step."""
    return Workload(family, 64, 100, 512, 512, dtype=dtype, kind=ENCODER, depth=4)


def bidirectional(family: str, rows: int) -> Workload:
    return Workload(family, rows, STEPS, 512, 512, dtype="float16", kind=ENCODER, depth=2, directions=2)


def _recurrent_on_cuda(family: str, quick: bool) -> Iterator[Workload]:
    if quick:
        yield from (_square(family, rows, hidden, dtype="float16") for hidden, rows in product((256, 512), (1, 32)))
        yield from next_steps(family, "float16", "cuda", quick)
        return
    for hidden, rows, steps in product(*_GRID_ON_CUDA[family]):
        yield Workload(family, rows, steps, hidden, hidden, dtype="float16")
    yield from _questions(family)
    yield from (_square(family, rows, hidden) for hidden, rows in product(*_FLOAT32_ON_CUDA))
    yield from (bidirectional(family, rows) for rows in (1, 32))
    yield deep(family, "float16")
    for dtype in ("float16", "bfloat16"):
        yield from next_steps(family, dtype, "cuda")
    if family == "lstm":
        for hidden, rows, steps in product((128, 256, 512), (1, 8), RECURRENCE_STEPS):
            yield Workload(family, rows, steps, 4 * hidden, hidden, dtype="float16", kind="recurrence")


def next_steps(family: str, dtype: str, device: str, quick: bool = False) -> Iterator[Workload]:
    """Yield the next chunks of live streams. device: cpu or cuda."""
    for hidden, rows, steps in product(
        SESSION_UNITS[: 1 if quick else None], SESSIONS[: 1 if quick else None], CHUNK_STEPS[device]
    ):
        yield Workload(family, rows, steps, hidden, hidden, dtype=dtype, kind=NEXT_STEPS)


def _questions(family: str) -> Iterator[Workload]:
    for hidden, rows in product(*(_LSTM_QUESTIONS_ON_CUDA if family == "lstm" else _QUESTIONS_ON_CUDA)):
        yield _square(family, rows, hidden, dtype="float16", lengths="questions", form=_usual(family))


def _grid_on_cuda(family: str, quick: bool) -> Iterator[Workload]:
    """Yield every form in every size, with the workloads that goals compare them with."""
    if quick:
        for hidden, rows, form in product((256, 512), (1, 32), FORMS[family]):
            yield _square(family, rows, hidden, dtype="float16", form=form)
        yield from (_folded(family, 32, STEPS, 512, form, dtype="float16") for form in FOLDED_FORMS[family])
        return
    yield Workload(family, 1, _COPIED, 512, 512, dtype="float16", kind="copy")
    for hidden, rows, steps in product(*_GRID_ON_CUDA.get(family, _SCAN_ON_CUDA)):
        yield from (Workload(family, rows, steps, hidden, hidden, dtype="float16", form=form) for form in FORMS[family])
    for hidden, rows, steps in product(*_SCAN_ON_CUDA):
        yield from (_folded(family, rows, steps, hidden, form, dtype="float16") for form in FOLDED_FORMS[family])
    yield from _questions(family)
    yield from (_square(family, rows, 512, form=_usual(family)) for rows in (1, 32))
    if family == "sru":
        yield Workload(family, 1, 4096, 512, 512, dtype="float16", form=LONG_MEMORY)
        for (hidden, rows, steps), form in product(product(*_FIGURE_ON_CUDA), FORMS[family]):
            yield Workload(family, rows, steps, hidden, hidden, dtype="float16", kind="every-step", form=form)


def _folded(family: str, rows: int, steps: int, hidden: int, form: str, **others: Any) -> Workload:
    return Workload(family, rows, steps, VOCABULARY, hidden, kind="folded", form=form, **others)
