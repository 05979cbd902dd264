"""One workload of the bench, and the meaning of its kind and form."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.bench import questions

FORMS = {"sru": ("v1", "v2"), "qrnn": ("window 1", "window 2"), "mingru": ("",)}
"""Variants of a layer: an SRU without (v1) or with (v2) the old cell in its gates; a QRNN with gates over 1 or 2 steps."""

LONG_MEMORY = "v1 long memory"
"""An SRU v1 with nearly open forget gates: its cell changes slowly."""

VOCABULARY = 20_000

ENCODER = "encoder"
"""The kind of several layers in sequence, or of both directions: the levels that a model of the service runs."""

NEXT_STEPS = "next-steps"
"""The kind of the next chunks of many live streams: each row starts from the state in its slot, and ends in another slot."""

WANT = {
    "layer": "last",
    NEXT_STEPS: "last",
    ENCODER: "last",
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
"""The output of the encoder by kind: a vector for each row, or for each step."""

WITHOUT_BASELINES = ("recurrence",)
"""Kinds over gate inputs. Layers of other libraries start earlier."""

BASELINES_ONLY = ("copy", "product")
"""Kinds without an encoder, which measure the speed of the device in the same run."""

TEXT_CNNS, STACKS, IDS = ("text-cnn", "text-cnn-ids"), ("tcn", "tcn-last"), ("folded", "text-cnn-ids")
"""Kinds with several layers in parallel, with several layers in sequence, and over token ids."""

TEXT_WIDTHS = (3, 4, 5)
"""Filter widths of a text CNN. It has the same number of maps for each, concatenated."""

DENSE_WIDTHS = {"width 3": 3, "width 5": 5}
"""Forms of a dense layer, which returns a vector for every step."""

INT8 = "int8"
"""The dtype of layers whose products take int8 weights and rows. Their data are float32."""

EMBEDDED, FOLDED = "embedded", "folded"
"""Forms of a text CNN over token ids: the layers look up an embedding, or tables of the embedding times the filters."""

TEMPORAL_WIDTH, DILATIONS = 3, tuple(2**layer for layer in range(8))
"""Layers of a temporal convolutional network (TCN): causal, with a residual connection around each two (Bai et al. 2018)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One layer in one direction over a batch, or an encoder. `kind` is a key of WANT; `form` is from FORMS, or a form of a convolution.

    inputs: columns of the data, or of the embedding of token ids; for a folded layer, the size of the vocabulary. depth, directions: the
    levels of an encoder, and the directions of each. A level reads the outputs of all directions of the previous level.
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
    depth: int = 1
    directions: int = 1

    @property
    def in_grid(self) -> bool:
        """Whether the workload belongs to the grid of sizes of a family with FORMS. Only the times of goals are measured there."""
        return self.family in FORMS and self.dtype == "float16" and self.lengths == "equal"

    @property
    def kernel_only(self) -> bool:
        """Whether only the time of the kernel is of interest on a GPU: there are many sizes."""
        return self.in_grid or self.kind == NEXT_STEPS

    @property
    def size(self) -> str:
        """Rows and steps, or rows and the kind of their lengths."""
        return f"{self.rows} x {self.steps}" if self.lengths == "equal" else f"{self.rows} {self.lengths}"

    @property
    def widths(self) -> tuple[int, ...]:
        """Distinct filter widths of a convolution."""
        if self.kind in TEXT_CNNS:
            return TEXT_WIDTHS
        return (TEMPORAL_WIDTH if self.kind in STACKS else DENSE_WIDTHS[self.form],)

    @property
    def window(self) -> int:
        """Steps that the gates of a family with FORMS read."""
        return FORMS[self.family].index(self.form) + 1 if self.family == "qrnn" else 1

    @property
    def layers(self) -> int:
        return len(DILATIONS) if self.kind in STACKS else self.depth

    @property
    def level_inputs(self) -> list[int]:
        """Columns that each level of an encoder reads."""
        return [self.inputs] + [self.directions * self.hidden] * (self.depth - 1)

    @property
    def outputs(self) -> int:
        """Outputs of one layer. The outputs of a text CNN's layers are concatenated."""
        return self.hidden // len(TEXT_WIDTHS) if self.kind in TEXT_CNNS else self.hidden

    def row_lengths(self) -> list[int]:
        return questions.lengths(self.rows) if self.lengths == "questions" else [self.steps] * self.rows

    def __str__(self) -> str:
        name = " ".join(word for word in (self.family, self.kind, self.form) if word)
        levels = f", {self.depth} level{'s' if self.depth > 1 else ''}" if self.kind == ENCODER else ""
        both = ", both directions" if self.directions == 2 else ""
        return f"{name} {self.size}, {self.inputs} -> {self.hidden}, {self.dtype}{levels}{both}"
