"""A model over float features, made up: the embedded models all take text."""

from __future__ import annotations

from pathlib import Path

import torch

from service.zoo import store
from service.zoo.spec import ALIASES, ClassifyHead, GRULayer, ModelSpec, SequenceInput

FEATURES, HIDDEN, LABELS = 16, 64, ("steady", "rising", "falling")
SCALE = 0.2
"""Of the normal weights: gates neither vanish nor saturate."""


def beside(models: Path, root: Path) -> Path:
    """`root`, with links to all that is in `models` and the model `sensors`."""
    for one in models.iterdir():
        if one.is_dir() or one.name == ALIASES:
            (root / one.name).symlink_to(one.resolve())
    write(root)
    return root


def write(root: Path) -> ModelSpec:
    """One GRU over rows of FEATURES numbers; the same weights every time."""
    spec = ModelSpec(
        name="sensors",
        description="Made-up weights, for the load test.",
        precision="float32",
        input=SequenceInput(kind="features", features=FEATURES, max_steps=1024),
        layers=(GRULayer(kind="gru", hidden=HIDDEN),),
        head=ClassifyHead(kind="classify", pool="last", labels=LABELS),
    )
    seeded = torch.Generator().manual_seed(0)
    weights = {name: SCALE * torch.randn(shape, generator=seeded) for name, shape in spec.tensors().items()}
    return store.write(root / spec.name / "1", spec, weights, card="Made-up weights, for the load test.\n")
