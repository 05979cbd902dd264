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
    """A tested option. part: classes of TensorFlow; build: makes the graph; recipe: TOML."""

    part: str
    option: str
    build: Build
    recipe: str = ""
    has_ids: bool = False


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


SEQUENCE = '[head]\nkind = "sequence"\n'
TAGGER = """\
[[layers]]
kind = "embedding"
from = "words"

[[layers]]
kind = "gru"
from = "bidirectional_rnn"

[[layers]]
kind = "dense"
from = "tags"

[head]
kind = "sequence"
"""
CELLS = ("BasicRNNCell", "BasicLSTMCell", "LSTMCell", "GRUCell", "CudnnCompatibleLSTMCell", "CudnnCompatibleGRUCell")
WITHOUT_FORGET_BIAS = '[[layers]]\nkind = "lstm"\nfrom = "rnn"\nforget_bias = 0.0\n' + SEQUENCE
CASES: dict[str, Case] = {
    **{f"{kind}.npz": Case(kind, "one level", one(kind), SEQUENCE) for kind in CELLS},
    **{f"{kind}_levels.npz": Case(kind, "MultiRNNCell", stacked(kind), SEQUENCE) for kind in CELLS},
    **{f"{kind}_both.npz": Case(kind, "bidirectional_dynamic_rnn", both(kind), SEQUENCE) for kind in CELLS},
    **{f"{kind}_stack.npz": Case(kind, "stack_bidirectional_dynamic_rnn", stack_of_both(kind), SEQUENCE) for kind in CELLS},
    "forget_bias.npz": Case("BasicLSTMCell", "forget_bias=0.0", one("BasicLSTMCell", forget_bias=0.0), WITHOUT_FORGET_BIAS),
    "peepholes.npz": Case("LSTMCell", "use_peepholes", one("LSTMCell", use_peepholes=True), SEQUENCE),
    "projection.npz": Case("LSTMCell", "num_proj", one("LSTMCell", num_proj=2), SEQUENCE),
    "classifier.npz": Case("embedding_lookup, dense", "found by names and sizes", classifier, has_ids=True),
    "tagger.npz": Case("embedding_lookup, dense", "named by a recipe", tagger, TAGGER, has_ids=True),
}
"""Cases by the name of the file."""
REFUSED = {
    "a recurrent layer twice": "write a recipe with [[layers]]",
    "directions in separate stacks": "are not joined at every level",
    "a convolution, without a recipe": "write a recipe with [[layers]]",
}
