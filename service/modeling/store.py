"""Reads and writes the weights of model folders, with every check. Never reads a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kernels.ragged import STORAGE
from service.errors import ModelError
from service.modeling.spec import CARD, MODEL, TOKENIZER, WEIGHTS, ModelSpec, digest, read, read_verified


def read_arrays(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Return the tensors of a version folder, on the CPU; raises ModelError unless they are exactly the tensors that `spec` describes."""
    data = read_verified(folder / WEIGHTS, spec)
    try:
        arrays = load(data)
    except SafetensorError as error:
        raise ModelError(f"{folder / WEIGHTS} is not a complete safetensors file: {error}") from error
    _check(folder / WEIGHTS, arrays, spec)
    return arrays


def write(folder: Path, spec: ModelSpec, arrays: Mapping[str, Tensor], *, card: str, tokenizer: str | None = None) -> ModelSpec:
    """Write a version folder and return `spec` with the digests of its files; raises ModelError if the arrays do not match `spec`."""
    if folder.parent.name != spec.name:
        raise ModelError(f"the model is named {spec.name!r} and its folder {folder.parent.name!r}: use the same name for both")
    stored = {name: array.to(STORAGE[spec.precision]).contiguous() for name, array in arrays.items()}
    _check(folder / WEIGHTS, stored, spec)
    files = {WEIGHTS: save(stored)} | ({TOKENIZER: tokenizer.encode()} if tokenizer is not None else {})
    signed = spec.model_copy(update={"sha256": {name: digest(data) for name, data in files.items()}})
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / CARD).write_text(card)
    (folder / MODEL).write_text(_toml(signed.model_dump(exclude_none=True)))
    read(folder)
    return signed


def _check(file: Path, arrays: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Raise ModelError unless `arrays` have the names, shapes and dtype that `spec` describes, and finite values."""
    shapes = spec.tensors()
    for name in sorted(shapes.keys() | arrays.keys()):
        if name not in arrays:
            raise ModelError(f"{file}: the tensor {name} of shape {shapes[name]} is missing")
        if name not in shapes:
            raise ModelError(f"{file}: the tensor {name} belongs to no layer of {MODEL}")
        array = arrays[name]
        if tuple(array.shape) != shapes[name]:
            raise ModelError(f"{file}: {name} has shape {tuple(array.shape)}, {MODEL} requires {shapes[name]}")
        if array.dtype != STORAGE[spec.precision]:
            raise ModelError(f"{file}: {name} is {array.dtype} and the precision in {MODEL} is {spec.precision}")
        if not bool(torch.isfinite(array).all()):
            raise ModelError(f"{file}: {name} has values that are not finite")


def _toml(values: Mapping[str, Any], path: str = "") -> str:
    """Return nested tables as TOML, plain values before tables as TOML requires."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not _nested(value)]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{path}{_key(key)}]", _toml(value, f"{path}{_key(key)}.").strip()]
        elif _nested(value):
            lines += [line for table in value for line in ("", f"[[{path}{_key(key)}]]", _toml(table).strip())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return a string, number, boolean or list as TOML, which differs from JSON in one character that needs an escape."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, tuple | list) and any(isinstance(item, Mapping) for item in value))


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)
