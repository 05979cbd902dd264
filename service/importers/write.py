"""Writes a draft as a version folder, with a card that names the source of the model and the comparison with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from kernels.ragged import STORAGE
from service.importers.draft import Draft, ImportRefused
from service.modeling import spec, store
from service.modeling.spec.error_messages import error_messages
from service.modeling.spec.files import replacing


def model_spec(draft: Draft, name: str, overrides: Mapping[str, Any]) -> spec.ModelSpec:
    """Return the description of a draft; raises ImportRefused for a recipe that does not fit the checkpoint."""
    try:
        return spec.ModelSpec.model_validate(draft.model(name, overrides))
    except ValidationError as error:
        raise draft.refusal(
            f"the model that follows from the checkpoint and the recipe is invalid: {'; '.join(error_messages(error))}"
        ) from error


def tensors(draft: Draft, model: spec.ModelSpec) -> dict[str, Tensor]:
    """Return the weights in the precision of the model; raises ImportRefused if they do not fit the model or are not finite."""
    if model.precision not in STORAGE:
        raise ImportRefused(f"precision is {model.precision!r} in the recipe: import in float32, then run seqserve compress")
    dtype, shapes, arrays = STORAGE[model.precision], model.tensors(), draft.arrays()
    for name in shapes | arrays:
        if name not in shapes or name not in arrays or arrays[name].shape != shapes[name]:
            found = (
                f"has the shape {arrays[name].shape} in the checkpoint" if name in arrays else "is missing in the checkpoint"
            )
            needed = f"needs {shapes[name]}" if name in shapes else "has no such tensor"
            advice = "" if draft.assumed else ": correct the recipe, or write one"
            raise draft.refusal(f"{name}{_of_source(draft, name)} {found}, and the model {needed}{advice}")
    weights = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array)
        if not bool(torch.isfinite(tensor).all()):
            raise ImportRefused(
                f"{name} has {int((~torch.isfinite(tensor)).sum())} values that are not finite: repair the checkpoint"
            )
        weights[name] = tensor.to(dtype, copy=True)  # a source may use one array in two places, which a file cannot
    return weights


def _of_source(draft: Draft, name: str) -> str:
    """Return the tensors of the source that make the layer of a tensor, or the head, in brackets."""
    place = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "head"
    found = [source for source, used in draft.used.items() if used.split()[0] == place]
    return f" (of {', '.join(found[:2] + ['...'] * (len(found) > 2))})" if found else ""


def write_version(root: Path, model: spec.ModelSpec, weights: Mapping[str, Tensor], card: str, tokenizer: str | None) -> Path:
    """Write the next version of the model and return its folder; raises ModelError if it cannot be written or read again.

    The folder appears in the models folder when it is complete.
    """
    spec.require_models_folder(root)
    target = spec.next_version(root, model.name)
    with replacing(target, root) as written:
        store.read_arrays(written, store.write(written, model, weights, card=card, tokenizer=tokenizer))
    return target
