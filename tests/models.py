"""Small models with made-up weights, written as folders that the real service reads."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from service.zoo import store
from service.zoo.spec import ClassifyHead, EmbeddingLayer, Layer, LSTMLayer, ModelSpec, SequenceInput

WORDS = ["[UNK]", "how", "far", "is", "the", "sea", "who", "was", "first", "?"]
LABELS = ("near", "far", "unknown")


def weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal values, scaled so that gates neither vanish nor saturate."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in spec.tensors().items()}


def words(
    root: Path, name: str = "words", *, version: int = 1, seed: int = 0, max_steps: int = 64, bidirectional: bool = True
) -> ModelSpec:
    """Text or ids over WORDS, one LSTM, three labels."""
    spec = ModelSpec(
        name=name,
        precision="float32",
        input=SequenceInput(kind="text", vocabulary=len(WORDS), max_steps=max_steps),
        layers=(EmbeddingLayer(kind="embedding", width=6), LSTMLayer(kind="lstm", hidden=5, bidirectional=bidirectional)),
        head=ClassifyHead(kind="classify", pool="max", labels=LABELS),
    )
    tokenizer = Tokenizer(WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return store.write(root / name / str(version), spec, weights(spec, seed), card="made up", tokenizer=tokenizer.to_str())


def sensors(root: Path, name: str = "sensors", *, features: int = 3, hidden: int = 8, max_steps: int = 200_000) -> ModelSpec:
    """Rows of float features; with many steps it is as slow as a test needs."""
    layers: tuple[Layer, ...] = (LSTMLayer(kind="lstm", hidden=hidden, depth=2),)
    spec = ModelSpec(
        name=name,
        precision="float32",
        input=SequenceInput(kind="features", features=features, max_steps=max_steps),
        layers=layers,
        head=ClassifyHead(kind="classify", pool="last", labels=LABELS),
    )
    return store.write(root / name / "1", spec, weights(spec), card="made up")
