"""A model over float features, made up: with more of them than the embedded one takes."""

from __future__ import annotations

from pathlib import Path

from loadtest import made_up
from service.modeling.spec import ALIASES, GRULayer, ModelSpec, SequenceInput

FEATURES, HIDDEN = 16, 64
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
    """One GRU over rows of FEATURES numbers."""
    rows = SequenceInput(kind="features", features=FEATURES, max_steps=1024)
    return made_up.write(root, "sensors", rows, GRULayer(kind="gru", hidden=HIDDEN), precision="float32", scale=SCALE)
