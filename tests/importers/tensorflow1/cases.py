"""Imports from TensorFlow 1.

`make_checkpoints` wrote the variables of each case, and TensorFlow's results with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FEATURES, UNITS, VOCABULARY = 3, 4, 11
LENGTHS = (7, 12, 5)
Build = Callable[[Any, Any], Any]
"""Returns the outputs of a graph, given the module `cells` of `make_checkpoints` and the input with its lengths."""


@dataclass(frozen=True)
class Case:
    """A tested option. build: makes the graph; recipe: TOML; more: whether it runs only in tests/long."""

    build: Build
    recipe: str = ""
    has_ids: bool = False
    more: bool = False


def one(kind: str, **options: Any) -> Build:
    """Return a graph of one cell."""
    return lambda tf, x: tf.steps(tf.cell(kind, **options), x)


def stacked(kind: str) -> Build:
    return lambda tf, x: tf.steps(tf.levels([tf.cell(kind), tf.cell(kind)]), x)


def both(kind: str) -> Build:
    return lambda tf, x: tf.both(lambda: tf.cell(kind), x)


def stack_of_both(kind: str) -> Build:
    return lambda tf, x: tf.stack_of_both(lambda: tf.cell(kind), x, levels=2)


def classifier(tf: Any, x: Any) -> Any:
    return tf.dense(tf.dense(tf.last(tf.cell("BasicLSTMCell"), tf.embedded(x)), 5, "hidden", "relu"), 2, "logits")


def tagger(tf: Any, x: Any) -> Any:
    return tf.dense(tf.both(lambda: tf.cell("GRUCell"), tf.embedded(x)), 3, "tags")


def layer(kind: str, prefix: str, more: str = "") -> str:
    return f'[[layers]]\nkind = "{kind}"\nfrom = "{prefix}"\n{more}'


SEQUENCE = '[head]\nkind = "sequence"\n'
TAGGER = layer("embedding", "words") + layer("gru", "bidirectional_rnn") + layer("dense", "tags") + SEQUENCE
CELLS = ("BasicRNNCell", "BasicLSTMCell", "LSTMCell", "GRUCell", "CudnnCompatibleLSTMCell", "CudnnCompatibleGRUCell")
WITHOUT_FORGET_BIAS = layer("lstm", "rnn", "forget_bias = 0.0\n") + SEQUENCE
ARRANGEMENTS: dict[str, tuple[Callable[[str], Build], str]] = {
    "": (one, "GRUCell"),
    "_levels": (stacked, "LSTMCell"),
    "_both": (both, "BasicRNNCell"),
    "_stack": (stack_of_both, "CudnnCompatibleGRUCell"),
}
"""Ways to arrange cells, and the cell with which `make test` checks each."""
CASES: dict[str, Case] = {
    **{
        f"{kind}{name}.npz": Case(arrange(kind), SEQUENCE, more=bool(name) and kind != in_short)
        for name, (arrange, in_short) in ARRANGEMENTS.items()
        for kind in CELLS
    },
    "forget_bias.npz": Case(one("BasicLSTMCell", forget_bias=0.0), WITHOUT_FORGET_BIAS),
    "peepholes.npz": Case(one("LSTMCell", use_peepholes=True), SEQUENCE),
    "projection.npz": Case(one("LSTMCell", num_proj=2), SEQUENCE),
    "classifier.npz": Case(classifier, has_ids=True),
    "tagger.npz": Case(tagger, TAGGER, has_ids=True),
}
"""Cases by the name of the file."""
