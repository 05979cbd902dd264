"""One workload of the bench, and what its kind and form say."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.bench import questions

FORMS = {"sru": ("v1", "v2"), "qrnn": ("window 1", "window 2")}
"""Which layer of its family, where there are several: an SRU whose gates do not see the old cell, or do; a QRNN's steps under a gate."""

LONG_MEMORY = "v1 long memory"
"""An SRU v1 whose forget gates are nearly open, so that a cell stays for many steps."""

VOCABULARY = 20_000

WANT = {
    "layer": "last",
    "every-step": "steps",
    "recurrence": "last",
    "folded": "last",
    "text-cnn": "max",
    "text-cnn-ids": "max",
    "dense-conv": "steps",
    "tcn": "steps",
    "tcn-last": "last",
    "copy": "steps",
    "product": "steps",
}
"""What leaves the encoder: a vector for each row, or one for each step."""

OURS_ALONE = ("recurrence", "folded")
"""Kinds for which peers are not asked: the data are gate inputs or token ids already, and layers of others always start before."""

PEERS_ALONE = ("copy", "product")
"""Kinds for which no encoder is asked: the device's own speed, in figures of the same run."""

TEXT_CNNS, STACKS, IDS = ("text-cnn", "text-cnn-ids"), ("tcn", "tcn-last"), ("folded", "text-cnn-ids")
"""Kinds of one call over several layers, side by side or one after the other, and those over token ids."""

TEXT_WIDTHS = (3, 4, 5)
"""Filter widths of a text CNN, which has as many maps of each width, concatenated."""

DENSE_WIDTHS = {"width 3": 3, "width 5": 5}
"""Forms of a dense layer, which gives a step for every step."""

EMBEDDED, FOLDED = "embedded", "folded"
"""Forms of a text CNN over token ids: its layers look them up in an embedding, or in tables into which that was multiplied."""

TEMPORAL_WIDTH, DILATIONS = 3, tuple(2**layer for layer in range(8))
"""Of a temporal convolutional network (TCN): causal layers, each two with what came in added to what they give (Bai et al. 2018)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One layer in one direction over a batch; `kind` says what is asked of it, see WANT; `form` is one of FORMS, or of those of a
    convolution above.

    inputs: columns of the data, or of the embedding of token ids; of a folded layer, how many ids there are.
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

    @property
    def widths(self) -> tuple[int, ...]:
        """Of a convolution's filters, each width once."""
        if self.kind in TEXT_CNNS:
            return TEXT_WIDTHS
        return (TEMPORAL_WIDTH if self.kind in STACKS else DENSE_WIDTHS[self.form],)

    @property
    def layers(self) -> int:
        return len(DILATIONS) if self.kind in STACKS else 1

    @property
    def outputs(self) -> int:
        """Of one layer; those of a text CNN stand side by side."""
        return self.hidden // len(TEXT_WIDTHS) if self.kind in TEXT_CNNS else self.hidden

    def row_lengths(self) -> list[int]:
        return questions.lengths(self.rows) if self.lengths == "questions" else [self.steps] * self.rows

    def __str__(self) -> str:
        size = f"{self.rows} x {self.steps}" if self.lengths == "equal" else f"{self.rows} {self.lengths}"
        name = " ".join(word for word in (self.family, self.kind, self.form) if word)
        return f"{name} {size}, {self.inputs} -> {self.hidden}, {self.dtype}"
