"""Write small models with random weights, as folders that the real service reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from service.modeling import store
from service.modeling.spec import ModelSpec, SequenceInput
from service.modeling.spec.heads import ClassifyHead, RegressHead
from service.modeling.spec.layers import EmbeddingLayer, Layer, LSTMLayer

WORDS = ["[UNK]", "how", "far", "is", "the", "sea", "who", "was", "first", "?"]
LABELS = ("near", "far", "unknown")
TEXT = {"kind": "text", "vocabulary": len(WORDS), "max_steps": 64}
IDS = {"kind": "ids", "vocabulary": 12, "max_steps": 64}
EMBEDDING = {"kind": "embedding", "width": 6}
SENSORS_HIDDEN = 256
"""Large enough for inputs of thousands of steps to take some time, which tests of running requests need."""
COUNT = 2.0**-12
"""One time step adds this to a cell of the accumulator. A power of two adds exactly in float32, and tanh(COUNT) rounds to COUNT."""


def weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return normal values, scaled so that gates neither vanish nor saturate."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in spec.tensors().items()}


def tokenizer() -> str:
    """Return a tokenizer that splits at spaces and punctuation; ids are indexes of WORDS."""
    made = Tokenizer(WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    text: str = made.to_str()
    return text


def words(
    root: Path, name: str = "words", *, version: int = 1, seed: int = 0, max_steps: int = 64, bidirectional: bool = True
) -> ModelSpec:
    """Write a text classifier over WORDS: one LSTM, three labels."""
    spec = ModelSpec(
        name=name,
        precision="float32",
        input=SequenceInput(kind="text", vocabulary=len(WORDS), max_steps=max_steps),
        layers=(EmbeddingLayer(kind="embedding", width=6), LSTMLayer(kind="lstm", hidden=5, bidirectional=bidirectional)),
        head=ClassifyHead(kind="classify", pool=("max",), labels=LABELS),
    )
    return store.write(root / name / str(version), spec, weights(spec, seed), card="made up", tokenizer=tokenizer())


def sensors(
    root: Path,
    name: str = "sensors",
    *,
    features: int = 3,
    hidden: int = SENSORS_HIDDEN,
    max_steps: int = 200_000,
    bidirectional: bool = False,
) -> ModelSpec:
    """Write a classifier of rows of floats. Long inputs make it slow, in a single batch when it is bidirectional."""
    layers: tuple[Layer, ...] = (LSTMLayer(kind="lstm", hidden=hidden, depth=2, bidirectional=bidirectional),)
    spec = ModelSpec(
        name=name,
        precision="float32",
        input=SequenceInput(kind="features", features=features, max_steps=max_steps),
        layers=layers,
        head=ClassifyHead(kind="classify", pool=("last",), labels=LABELS),
    )
    return store.write(root / name / "1", spec, weights(spec), card="made up")


def made_up(root: Path, name: str, input: Mapping[str, Any], *layers: Mapping[str, Any], head: Mapping[str, Any]) -> ModelSpec:
    """Write version 1 of a model with these tables of model.toml."""
    tables = {"name": name, "precision": "float32", "input": input, "layers": layers, "head": head}
    spec = ModelSpec.model_validate(tables)
    words = tokenizer() if spec.input.kind == "text" else None
    return store.write(root / name / "1", spec, weights(spec, seed=len(name)), card="made up", tokenizer=words)


def tagger(root: Path) -> ModelSpec:
    """Write a model that labels every word."""
    gru = {"kind": "gru", "hidden": 5, "bidirectional": True}
    return made_up(root, "tagger", TEXT, EMBEDDING, gru, head={"kind": "tag", "labels": LABELS})


def reader(root: Path) -> ModelSpec:
    """Write a model that finds the likeliest span of token ids."""
    sru = {"kind": "sru", "hidden": 3, "depth": 2, "bidirectional": True}
    return made_up(root, "reader", IDS, EMBEDDING, sru, head={"kind": "span"})


def speller(root: Path) -> ModelSpec:
    """Write a model that predicts the next token id."""
    lstm = {"kind": "lstm", "hidden": 5, "depth": 2}
    return made_up(root, "speller", IDS, EMBEDDING, lstm, head={"kind": "next", "top": 4})


def forecaster(root: Path) -> ModelSpec:
    """Write a model of a time series: two numbers from rows of three."""
    qrnn = {"kind": "qrnn", "hidden": 7, "window": 2}
    conv = {"kind": "conv", "filters": 5, "width": 3, "padding": "causal", "dilation": 2}
    series = {"kind": "features", "features": 3, "max_steps": 500}
    return made_up(root, "forecaster", series, qrnn, conv, head={"kind": "regress", "pool": "last", "outputs": 2})


def embedder(root: Path) -> ModelSpec:
    """Write a model that returns one unit vector for a text of three words or more."""
    cnn = {"kind": "text_cnn", "filters": 4, "widths": [2, 3]}
    return made_up(root, "embedder", TEXT, EMBEDDING, cnn, head={"kind": "embed", "pool": "max", "normalize": True})


def halver(root: Path) -> ModelSpec:
    """Write a model that returns a vector for every second row of two numbers; it needs three rows."""
    conv = {"kind": "conv", "filters": 5, "width": 3, "padding": "none", "stride": 2, "activation": "tanh"}
    return made_up(root, "halver", {"kind": "features", "features": 2, "max_steps": 64}, conv, head={"kind": "sequence"})


def accumulator(root: Path, name: str = "accumulator", *, max_steps: int = 30_000, hidden: int = 2) -> ModelSpec:
    """Write a model with two sums over ids 0, 1 and 2, which stand for -1, 0 and 1: the sum of the values, and the number of steps.

    Three gates are saturated, as sigmoid(40) is 1 in float32, and nothing recurs but the cell: that holds each sum times COUNT, and the
    head answers its tanh. Units after the first two only take time.
    """
    spec = ModelSpec(
        name=name,
        precision="float32",
        input=SequenceInput(kind="ids", vocabulary=3, max_steps=max_steps),
        layers=(EmbeddingLayer(kind="embedding", width=1), LSTMLayer(kind="lstm", hidden=hidden)),
        head=RegressHead(kind="regress", pool=("last",), outputs=2),
    )
    arrays = {tensor: torch.zeros(shape) for tensor, shape in spec.tensors().items()}
    arrays["layers.0.weight"] = torch.tensor([[-1.0], [0.0], [1.0]])
    inputs, biases = (arrays[f"layers.1.0.forward.{name}"].view(-1, 4, hidden) for name in ("input", "bias"))
    input_gate, forget_gate, cell_gate, output_gate = range(4)
    inputs[0, cell_gate, 0] = COUNT
    biases[0, [input_gate, forget_gate, output_gate], :2] = 40.0
    biases[0, cell_gate, 1] = COUNT
    arrays["head.weight"][:2, :2] = torch.eye(2)
    return store.write(root / name / "1", spec, arrays, card="made up")


OF_EVERY_HEAD: dict[str, Callable[[Path], ModelSpec]] = {
    "words": words,
    "forecaster": forecaster,
    "tagger": tagger,
    "reader": reader,
    "speller": speller,
    "embedder": embedder,
    "halver": halver,
}
"""Models with the heads classify, regress, tag, span, next, embed and sequence, by name."""
