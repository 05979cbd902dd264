"""What is timed: the sizes of every family's workloads on each kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from kernels.bench import questions

STEPS = 64

FORMS = {"sru": ("v1", "v2"), "qrnn": ("window 1", "window 2")}
"""Which layer of its family, where there are several: an SRU whose gates do not see the old cell, or do; a QRNN's steps under a gate."""

LONG_MEMORY = "v1 long memory"
"""An SRU v1 whose forget gates are nearly open, so that a cell stays for many steps."""

FOLDED_FORMS = {"sru": FORMS["sru"], "qrnn": FORMS["qrnn"][:1]}
"""Forms whose first layer is timed over token ids as well."""

VOCABULARY = 20_000

RECURRENCE_STEPS = (STEPS, 320)
"""Two lengths, so that the time of a step and the time of a call without any can be told apart."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One layer in one direction over a batch; `kind` says what is asked of it, see WANT and WIDTHS; `form` is one of FORMS.

    inputs: columns of the data, or where these are token ids, how many there are.
    """

    family: str
    rows: int
    steps: int
    inputs: int
    hidden: int
    lengths: str = "equal"
    dtype: str = "float32"
    kind: str = "layer"
    form: str = ""

    @property
    def in_grid(self) -> bool:
        """One of the many sizes on a GPU of the families with FORMS: what none of their goals needs is not timed there."""
        return self.family in FORMS and self.dtype == "float16" and self.lengths == "equal"

    def row_lengths(self) -> list[int]:
        return questions.lengths(self.rows) if self.lengths == "questions" else [self.steps] * self.rows

    def __str__(self) -> str:
        size = f"{self.rows} x {self.steps}" if self.lengths == "equal" else f"{self.rows} {self.lengths}"
        name = " ".join(word for word in (self.family, self.kind, self.form) if word)
        return f"{name} {size}, {self.inputs} -> {self.hidden}, {self.dtype}"


WANT = {
    "layer": "last",
    "every-step": "steps",
    "recurrence": "last",
    "folded": "last",
    "text-cnn": "max",
    "dense-conv": "steps",
    "copy": "steps",
}
"""What leaves the encoder: a vector for each row, or one for each step."""

OURS_ALONE = ("recurrence", "folded")
"""Kinds for which peers are not asked: the data are gate inputs or token ids already, and layers of others always start before."""

PEERS_ALONE = ("copy",)
"""Kinds for which no encoder is asked: the device's own speed, in figures of the same run."""

WIDTHS = {"text-cnn": (3, 4, 5), "dense-conv": (5,)}
"""Filter widths; a text CNN has as many maps of each width, concatenated."""


def workloads(family: str, device: str, quick: bool) -> list[Workload]:
    """device: cpu or cuda; `quick` leaves the large sizes out."""
    if family == "conv":
        return list(_conv_on_cpu(quick) if device == "cpu" else _conv_on_cuda(quick))
    if device == "cpu":
        return list(_recurrent_on_cpu(family, quick))
    return list(_grid_on_cuda(family, quick) if family in FORMS else _recurrent_on_cuda(family, quick))


def of_the_figure(workload: Workload) -> bool:
    """Whether it stands in the figure of speed in Lei et al. 2018, where a layer gives every step."""
    return workload.kind == "every-step"


def one_long_row(workload: Workload) -> bool:
    size = workload.rows, workload.steps, workload.hidden
    return workload.in_grid and workload.kind == "layer" and size == (1, 4096, 512)


def _square(family: str, rows: int, hidden: int, **others: str) -> Workload:
    return Workload(family, rows, STEPS, hidden, hidden, **others)


def _usual(family: str) -> str:
    """The form that is timed where one is enough."""
    return FORMS[family][-1] if family in FORMS else ""


def _text_cnn(rows: int, **others: str) -> Workload:
    return Workload("conv", rows, STEPS, 300, 300, kind="text-cnn", **others)


def _dense(rows: int, hidden: int, **others: str) -> Workload:
    return _square("conv", rows, hidden, kind="dense-conv", **others)


def _recurrent_on_cpu(family: str, quick: bool) -> Iterator[Workload]:
    for hidden, rows, lengths in product((128, 256) if quick else (128, 256, 512), (1, 8, 32), ("equal", "questions")):
        yield _square(family, rows, hidden, lengths=lengths, form=_usual(family))


def _conv_on_cpu(quick: bool) -> Iterator[Workload]:
    for rows, lengths in product((1, 8, 32), ("equal", "questions")):
        yield _text_cnn(rows, lengths=lengths)
    for hidden, rows, lengths in product((128, 256) if quick else (128, 256, 512), (1, 32), ("equal", "questions")):
        yield _dense(rows, hidden, lengths=lengths)


_GRID_ON_CUDA = {
    # Hidden sizes, rows and steps.
    "lstm": ((128, 256, 512, 768, 1024, 2048), (1, 8, 32, 64, 256), (STEPS,)),
    "gru": ((256, 512, 1024), (1, 32, 256), (STEPS,)),
    "sru": ((256, 512, 1024), (1, 32, 256), (32, 128, 1024, 4096)),
    "qrnn": ((256, 512, 1024), (1, 32, 256), (32, 128, 4096)),
}
_FOLDED_ON_CUDA = (256, 512, 1024), (1, 32, 256), (32, 128, 4096)
_FIGURE_ON_CUDA = (256, 512), (32,), (32, 128)
_COPIED = 1 << 20
"""Steps of 512 float16 columns: 1 GiB, of which none is in a cache."""
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
    yield from _beside_the_grid(family)
    if family == "lstm":
        for hidden, rows, steps in product((128, 256, 512), (1, 8), RECURRENCE_STEPS):
            yield Workload(family, rows, steps, 4 * hidden, hidden, dtype="float16", kind="recurrence")


def _beside_the_grid(family: str) -> Iterator[Workload]:
    form = _usual(family)
    for hidden, rows in product(*_QUESTIONS_ON_CUDA[family]):
        yield _square(family, rows, hidden, dtype="float16", lengths="questions", form=form)
    yield from (_square(family, rows, 512, form=form) for rows in (1, 32))


def _grid_on_cuda(family: str, quick: bool) -> Iterator[Workload]:
    """Every form over every size, then what each of them is held against."""
    if quick:
        for hidden, rows, form in product((256, 512), (1, 32), FORMS[family]):
            yield _square(family, rows, hidden, dtype="float16", form=form)
        yield from (_folded(family, 32, STEPS, 512, form) for form in FOLDED_FORMS[family])
        return
    yield Workload(family, 1, _COPIED, 512, 512, dtype="float16", kind="copy")
    for hidden, rows, steps in product(*_GRID_ON_CUDA[family]):
        yield from (Workload(family, rows, steps, hidden, hidden, dtype="float16", form=form) for form in FORMS[family])
    for hidden, rows, steps in product(*_FOLDED_ON_CUDA):
        yield from (_folded(family, rows, steps, hidden, form) for form in FOLDED_FORMS[family])
    yield from _beside_the_grid(family)
    if family == "sru":
        yield Workload(family, 1, 4096, 512, 512, dtype="float16", form=LONG_MEMORY)
        for (hidden, rows, steps), form in product(product(*_FIGURE_ON_CUDA), FORMS[family]):
            yield Workload(family, rows, steps, hidden, hidden, dtype="float16", kind="every-step", form=form)


def _folded(family: str, rows: int, steps: int, hidden: int, form: str) -> Workload:
    return Workload(family, rows, steps, VOCABULARY, hidden, dtype="float16", kind="folded", form=form)


def _conv_on_cuda(quick: bool) -> Iterator[Workload]:
    yield from (_text_cnn(rows, dtype="float16") for rows in ((1, 32) if quick else (1, 8, 32, 64, 256)))
    yield from (_dense(rows, hidden, dtype="float16") for hidden, rows in product((256,) if quick else (256, 512), (1, 32)))
    if not quick:
        yield from (_text_cnn(rows, dtype="float16", lengths="questions") for rows in (1, 32, 256))
        yield from (_text_cnn(32), _dense(32, 512))
