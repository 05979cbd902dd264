"""Reads the tensors of a checkpoint. Never runs its code, and never allocates more than the file holds."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from service.importers.draft import ZIP_ERRORS, Array, ImportQuestion, ImportRefused, refusing
from service.modeling.spec.files import read_file

SAFETENSORS = ".safetensors"
"""The suffix of files with tensors in alphabetical order, not in the order of the model."""
MAX_TENSORS, ZIP_MAGIC = 100_000, b"PK\3\4"
TOP, LONGEST = ".", 1000
"""The place of tensors that are in no dictionary of a checkpoint, and the length of a place within which none is read."""
_CODE = re.compile(r"GLOBAL ([\w.]+)")


def read_tensors(file: Path, chosen: str | None) -> dict[str, Array]:
    """Return the tensors of a .safetensors file or of a state_dict that torch.save wrote, by name, with floats in float32.

    chosen: the places of state_dicts in the file, separated by commas, whose names then begin with their place if there are several; None
    for the only one. Raises ImportRefused for a file without tensors, and ImportQuestion for one that has several state_dicts.
    """
    found = {TOP: _safetensors(file)} if file.suffix == SAFETENSORS else _state_dicts(file)
    places = list(found) if chosen is None else chosen.split(",")
    if not set(places) <= found.keys() or (chosen is None and len(found) > 1):
        raise ImportQuestion(
            f"{file} has weights at {', '.join(found)}: add --weights NAME, or NAME,NAME for parts of one model"
        )
    tensors = {f"{place}." * (len(places) > 1) + name: tensor for place in places for name, tensor in found[place].items()}
    if len(tensors) > MAX_TENSORS:
        raise ImportRefused(
            f"{file} has {len(tensors)} tensors, at most {MAX_TENSORS} are read: is it the checkpoint of one model?"
        )
    return {name: _array(name, tensor) for name, tensor in tensors.items()}


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        content = read_file(file)
        tensors = load(content)
    except (OSError, SafetensorError) as error:
        raise ImportRefused(f"{file} is not a complete safetensors file: {error}") from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    # save_model writes tensors that are shared once, and their other names into the metadata.
    tensors = {name: tensors[kept] for name, kept in header.get("__metadata__", {}).items() if kept in tensors} | tensors
    return {name: tensors[name] for name in sorted(tensors, key=_natural)}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layers.2 before layers.10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _state_dicts(file: Path) -> dict[str, dict[str, Tensor]]:
    """Return the state_dicts in a checkpoint by their places."""
    _check_archive(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises many kinds, of damaged files too
        code = _CODE.search(str(error))
        found = f"has the object {code[1]}, which is code," if code else "is damaged, or has more than tensors,"
        raise ImportRefused(
            f"{file} {found} and is not read: load it where you trust it, and save the weights alone with "
            "torch.save(model.state_dict(), FILE)"
        ) from error
    state_dicts = _with_tensors(content)
    if not state_dicts:
        raise ImportRefused(f"{file} has no tensors: save the weights with torch.save(model.state_dict(), FILE)")
    return state_dicts


def _check_archive(file: Path) -> None:
    """Raise ImportRefused for an archive that torch.save does not write: a compressed archive can expand. Before 1.6, torch.save wrote
    a sequence of pickles and numbers, without an archive."""
    with file.open("rb") as opened:
        if opened.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
            return
    damaged = refusing(ZIP_ERRORS, f"{file} is no archive of torch.save", "save it again with a current torch")
    with damaged, zipfile.ZipFile(file) as archive:
        is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
    if is_compressed:
        raise ImportRefused(f"{file} is compressed, which torch.save does not do: save it again")


def _with_tensors(content: Any) -> dict[str, dict[str, Tensor]]:
    """Return the dictionaries with weights in a checkpoint by their places, except the state of optimizers. A single number, such as the
    loss of a training, is no weight."""
    found: dict[str, dict[str, Tensor]] = {}
    waiting, known = [("", content)], set[int]()
    for place, item in waiting:  # grows
        if isinstance(item, Mapping) and "param_groups" not in item and id(item) not in known:
            known.add(id(item))
            tensors = {str(name): value for name, value in item.items() if isinstance(value, Tensor)}
            if any(tensor.is_floating_point() and tensor.numel() > 1 for tensor in tensors.values()):
                found[place or TOP] = tensors
            waiting += [(f"{place}.{name}".lstrip("."), value) for name, value in item.items() if len(place) < LONGEST]
    return found


def _array(name: str, tensor: Tensor) -> Array:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ImportRefused(f"{name} is a {tensor.layout} tensor: import the dense weights")
    if tensor.is_floating_point() and tensor.element_size() == 1:
        raise ImportRefused(f"{name} is of type {tensor.dtype}, and its scale may be elsewhere: save the weights in float32")
    if not tensor.numel():
        raise ImportRefused(f"{name} has the shape {tuple(tensor.shape)}, which has no numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ImportRefused(
            f"{name} has the shape {tuple(tensor.shape)} over {tensor.untyped_storage().nbytes()} bytes: save it whole"
        )
    if not tensor.is_floating_point():
        return np.asarray(tensor.numpy())
    return np.asarray(tensor.detach().float().resolve_neg().contiguous().numpy())  # a parameter has a gradient
