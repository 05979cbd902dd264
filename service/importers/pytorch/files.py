"""Reads the tensors of a checkpoint. Never runs its code, and never allocates more than the file holds."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from service.importers.draft import Array, ImportRefused
from service.modeling.spec import read_file

SAFETENSORS = ".safetensors"
"""The suffix of files with tensors in alphabetical order, not in the order of the model."""
MAX_TENSORS = 100_000
_CODE = re.compile(r"GLOBAL ([\w.]+)")


def read_tensors(file: Path) -> dict[str, Array]:
    """Return the tensors of a .safetensors file or of a state_dict that torch.save wrote, by name, with floats in float32.

    A checkpoint may have the state_dict in a dictionary with other entries. Raises ImportRefused for anything else.
    """
    tensors = _safetensors(file) if file.suffix == SAFETENSORS else _state_dict(file)
    if len(tensors) > MAX_TENSORS:
        raise ImportRefused(
            f"{file} has {len(tensors)} tensors, at most {MAX_TENSORS} are read: is it the checkpoint of one model?"
        )
    return {name: _array(name, tensor) for name, tensor in tensors.items()}


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors = load(read_file(file))
    except (OSError, SafetensorError) as error:
        raise ImportRefused(f"{file} is not a complete safetensors file: {error}") from error
    return {name: tensors[name] for name in sorted(tensors, key=_natural)}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layers.2 before layers.10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _state_dict(file: Path) -> dict[str, Tensor]:
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
    tensors = dict(_tensors(content))
    if not tensors:
        raise ImportRefused(f"{file} has no tensors: save the weights with torch.save(model.state_dict(), FILE)")
    return tensors


def _check_archive(file: Path) -> None:
    """Raise ImportRefused unless the file is an archive as torch.save writes it: uncompressed, so that it cannot expand."""
    try:
        with zipfile.ZipFile(file) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ImportRefused(f"{file} is compressed, which torch.save does not do: save it again")
    except (OSError, zipfile.BadZipFile) as error:
        raise ImportRefused(f"{file} is no archive of torch.save ({error}): save it again with a current torch") from error


def _tensors(content: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of the state_dict in a checkpoint: the checkpoint itself, or the first dictionary with tensors in it."""
    if not isinstance(content, Mapping):
        return
    own = [(str(name), value) for name, value in content.items() if isinstance(value, Tensor)]
    if own:
        yield from own
        return
    for value in content.values():
        inner = list(_tensors(value))
        if inner:
            yield from inner
            return


def _array(name: str, tensor: Tensor) -> Array:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ImportRefused(f"{name} is a {tensor.layout} tensor: import the dense weights")
    if not tensor.numel():
        raise ImportRefused(f"{name} has the shape {tuple(tensor.shape)}, which has no numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ImportRefused(
            f"{name} has the shape {tuple(tensor.shape)} over {tensor.untyped_storage().nbytes()} bytes: save it whole"
        )
    if not tensor.is_floating_point():
        return np.asarray(tensor.numpy())
    return np.asarray(tensor.float().contiguous().numpy())
