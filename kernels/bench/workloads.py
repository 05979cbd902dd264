"""What is timed: the sizes of every family's workloads on each kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from kernels.bench import questions

STEPS = 64

RECURRENCE_STEPS = (STEPS, 320)
"""Two lengths, so that the time of a step and the time of a call without any can be told apart."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One layer in one direction over a batch; `kind` says what is asked of it, see WANT and WIDTHS."""

    family: str
    rows: int
    steps: int
    inputs: int
    hidden: int
    lengths: str = "equal"
    dtype: str = "float32"
    kind: str = "layer"

    def row_lengths(self) -> list[int]:
        return questions.lengths(self.rows) if self.lengths == "questions" else [self.steps] * self.rows

    def __str__(self) -> str:
        size = f"{self.rows} x {self.steps}" if self.lengths == "equal" else f"{self.rows} {self.lengths}"
        return f"{self.family} {self.kind} {size}, {self.inputs} -> {self.hidden}, {self.dtype}"


WANT = {"layer": "last", "recurrence": "last", "text-cnn": "max", "dense-conv": "steps"}
"""What leaves the encoder: a vector for each row, or one for each step."""

OURS_ALONE = ("recurrence",)
"""Kinds for which peers are not asked: the data are gate inputs already, and layers of others always compute these."""

WIDTHS = {"text-cnn": (3, 4, 5), "dense-conv": (5,)}
"""Filter widths; a text CNN has as many maps of each width, concatenated."""


def workloads(family: str, device: str, quick: bool) -> list[Workload]:
    """device: cpu or cuda; `quick` leaves the large sizes out."""
    if family == "conv":
        return list(_conv_on_cpu(quick) if device == "cpu" else _conv_on_cuda(quick))
    return list(_recurrent_on_cpu(family, quick) if device == "cpu" else _recurrent_on_cuda(family, quick))


def _square(family: str, rows: int, hidden: int, **others: str) -> Workload:
    return Workload(family, rows, STEPS, hidden, hidden, **others)


def _text_cnn(rows: int, **others: str) -> Workload:
    return Workload("conv", rows, STEPS, 300, 300, kind="text-cnn", **others)


def _dense(rows: int, hidden: int, **others: str) -> Workload:
    return _square("conv", rows, hidden, kind="dense-conv", **others)


def _recurrent_on_cpu(family: str, quick: bool) -> Iterator[Workload]:
    for hidden, rows, lengths in product((128, 256) if quick else (128, 256, 512), (1, 8, 32), ("equal", "questions")):
        yield _square(family, rows, hidden, lengths=lengths)


def _conv_on_cpu(quick: bool) -> Iterator[Workload]:
    for rows, lengths in product((1, 8, 32), ("equal", "questions")):
        yield _text_cnn(rows, lengths=lengths)
    for hidden, rows, lengths in product((128, 256) if quick else (128, 256, 512), (1, 32), ("equal", "questions")):
        yield _dense(rows, hidden, lengths=lengths)


_GRID_ON_CUDA = {
    # Hidden sizes, rows and steps. The SRU's are those of the figure of speed in Lei et al. 2018.
    "lstm": ((128, 256, 512, 768, 1024, 2048), (1, 8, 32, 64, 256), (STEPS,)),
    "gru": ((256, 512, 1024), (1, 32, 256), (STEPS,)),
    "sru": ((256, 512), (1, 32), (32, 128)),
    "qrnn": ((256, 512), (1, 32), (STEPS,)),
}
_QUESTIONS_ON_CUDA = {
    # Hidden sizes and rows.
    "lstm": ((128, 256, 512), (8, 32, 64)),
    "gru": ((256, 512), (32,)),
    "sru": ((256, 512), (32,)),
    "qrnn": ((256, 512), (32,)),
}


def _recurrent_on_cuda(family: str, quick: bool) -> Iterator[Workload]:
    if quick:
        yield from (_square(family, rows, hidden, dtype="float16") for hidden, rows in product((256, 512), (1, 32)))
        return
    for hidden, rows, steps in product(*_GRID_ON_CUDA[family]):
        yield Workload(family, rows, steps, hidden, hidden, dtype="float16")
    for hidden, rows in product(*_QUESTIONS_ON_CUDA[family]):
        yield _square(family, rows, hidden, dtype="float16", lengths="questions")
    yield from (_square(family, rows, 512) for rows in (1, 32))
    if family == "lstm":
        for hidden, rows, steps in product((128, 256, 512), (1, 8), RECURRENCE_STEPS):
            yield Workload(family, rows, steps, 4 * hidden, hidden, dtype="float16", kind="recurrence")


def _conv_on_cuda(quick: bool) -> Iterator[Workload]:
    yield from (_text_cnn(rows, dtype="float16") for rows in ((1, 32) if quick else (1, 8, 32, 64, 256)))
    yield from (_dense(rows, hidden, dtype="float16") for hidden, rows in product((256,) if quick else (256, 512), (1, 32)))
    if not quick:
        yield from (_text_cnn(rows, dtype="float16", lengths="questions") for rows in (1, 32, 256))
        yield from (_text_cnn(32), _dense(32, 512))
