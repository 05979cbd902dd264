"""Imports checkpoints in tests, and compares the models with the outputs of their source."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from service.importers.command import ImportRequest, import_model
from service.modeling.npz import write_npz
from service.settings import Settings

LENGTHS = (9, 1, 4)
VOCABULARY, FEATURES = 17, 3


def import_file(
    folder: Path, checkpoint: Path, *, check: Mapping[str, Any] | None = None, recipe: str = "", **others: Any
) -> list[str]:
    """Import a checkpoint as the model `imported` in folder/models; return the lines of the report.

    check: sample inputs and expected outputs; recipe: TOML.
    """
    files: dict[str, Any] = {}
    if check is not None:
        files["check"] = folder / "check.npz"
        write_npz(files["check"], {name: np.asarray(values) for name, values in check.items()})
    if recipe:
        files["recipe"] = folder / "recipe.toml"
        files["recipe"].write_text(recipe)
    lines: list[str] = []
    settings = Settings(models=folder / "models")
    import_model(settings, ImportRequest(checkpoint, "imported", **files, **others), lines.append)
    return lines


def layer(kind: str, prefix: str, **keys: Any) -> str:
    """Return a layer of a recipe. keys: values by name; texts are TOML."""
    lines = (f"{name} = {value if isinstance(value, str) else json.dumps(value)}\n" for name, value in keys.items())
    return f'[[layers]]\nkind = "{kind}"\nfrom = "{prefix}"\n' + "".join(lines)


def save(folder: Path, module: nn.Module) -> Path:
    """Save the weights of a module as its users do."""
    file = folder / "weights.pt"
    torch.save(module.state_dict(), file)
    return file


def random_ids(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def random_features(lengths: Sequence[int] = LENGTHS, features: int = FEATURES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(length, features, generator=generator) for length in lengths]


@torch.no_grad()
def expected(run: Callable[[Tensor], Mapping[str, Tensor]], rows: Sequence[Tensor]) -> dict[str, Any]:
    """Return the contents of a file for `check`: packed rows, and what `run` returns for each row alone.

    run: returns outputs of one row by name: `sequence` by step, others one vector.
    """
    results = [run(row) for row in rows]
    name = "ids" if rows[0].dim() == 1 else "inputs"
    packed: dict[str, Any] = {name: torch.cat(list(rows)), "offsets": np.cumsum([0, *map(len, rows)])}
    for output in results[0]:
        values = [result[output] for result in results]
        packed[output] = torch.cat(values) if output == "sequence" else torch.stack(values)
    return packed


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and statistic a random value, so that none is zero or one by default, and return the module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.5)
            if name.endswith(("running_var", "weight_g", "original0")):
                value.abs_().add_(0.5)
    return module.eval()
