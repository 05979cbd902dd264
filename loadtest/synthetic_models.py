"""Models with seeded random weights, for measurements in which only sizes matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from service.modeling import store
from service.modeling.spec import ModelSpec, SequenceInput
from service.modeling.spec.heads import ClassifyHead
from service.modeling.spec.layers import Layer

CARD = "Random weights, for load tests.\n"
LABELS = ("steady", "rising", "falling")


def write(
    root: Path,
    name: str,
    input: SequenceInput,
    *layers: Layer,
    precision: str = "float16",
    scale: float = 0.05,
    labels: Sequence[str] = LABELS,
    tokenizer: str | None = None,
) -> ModelSpec:
    """Write version 1 of a model that classifies the last step. The weights are normal, times `scale`, from a fixed seed."""
    head = ClassifyHead(kind="classify", pool=("last",), labels=tuple(labels))
    tables = {"name": name, "description": CARD.strip(), "precision": precision, "input": input, "layers": layers, "head": head}
    spec = ModelSpec.model_validate(tables)
    seeded = torch.Generator().manual_seed(0)
    weights = {key: scale * torch.randn(shape, generator=seeded) for key, shape in spec.tensors().items()}
    return store.write(root / name / "1", spec, weights, card=CARD, tokenizer=tokenizer)
