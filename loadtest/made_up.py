"""Models of made-up weights, for what only sizes matter."""

from __future__ import annotations

from pathlib import Path

import torch

from service.modeling import store
from service.modeling.spec import ClassifyHead, Layer, ModelSpec, SequenceInput

CARD = "Made-up weights, for load tests.\n"
LABELS = ("steady", "rising", "falling")


def write(
    root: Path, name: str, input: SequenceInput, *layers: Layer, precision: str = "float16", scale: float = 0.05
) -> ModelSpec:
    """Version 1, which classifies the last step; the same weights every time, normal ones times `scale`."""
    head = ClassifyHead(kind="classify", pool="last", labels=LABELS)
    tables = {"name": name, "description": CARD.strip(), "precision": precision, "input": input, "layers": layers, "head": head}
    spec = ModelSpec.model_validate(tables)
    seeded = torch.Generator().manual_seed(0)
    weights = {key: scale * torch.randn(shape, generator=seeded) for key, shape in spec.tensors().items()}
    return store.write(root / name / "1", spec, weights, card=CARD)
