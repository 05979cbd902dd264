"""Model folders on disk: read with every check, written so that the checks pass. No pickle is ever read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kernels.contract import STORAGE
from service.errors import ModelError
from service.modeling.spec import CARD, MODEL, TOKENIZER, WEIGHTS, ModelSpec, digest, read, verified


def read_arrays(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """The tensors that `spec` names, on the CPU, in the model's precision; raises ModelError naming file and tensor."""
    data = verified(folder / WEIGHTS, spec)
    try:
        arrays = load(data)
    except SafetensorError as fault:
        raise ModelError(f"{folder / WEIGHTS} is not a whole safetensors file: {fault}") from fault
    _check(folder / WEIGHTS, arrays, spec)
    return arrays


def write(folder: Path, spec: ModelSpec, arrays: Mapping[str, Tensor], *, card: str, tokenizer: str | None = None) -> ModelSpec:
    """Write one version; returns the spec with the digests of its files. Raises ModelError if the arrays are not the spec's."""
    if folder.parent.name != spec.name:
        raise ModelError(f"the model is {spec.name!r} and its folder would be {folder.parent.name!r}: make them the same")
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
    shapes = spec.tensors()
    for name in sorted(shapes.keys() | arrays.keys()):
        if name not in arrays:
            raise ModelError(f"{file}: the tensor {name} of shape {shapes[name]} is missing")
        if name not in shapes:
            raise ModelError(f"{file}: the tensor {name} belongs to no layer of {MODEL}")
        array = arrays[name]
        if tuple(array.shape) != shapes[name]:
            raise ModelError(f"{file}: {name} has the shape {tuple(array.shape)} and {MODEL} asks for {shapes[name]}")
        if array.dtype != STORAGE[spec.precision]:
            raise ModelError(f"{file}: {name} is {array.dtype} and the precision in {MODEL} is {spec.precision}")
        if not bool(torch.isfinite(array).all()):
            raise ModelError(f"{file}: {name} has values that are not finite")


def _toml(values: Mapping[str, Any], path: str = "") -> str:
    """TOML of nested tables; plain values come before the tables, as TOML asks."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not _nested(value)]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{path}{_key(key)}]", _toml(value, f"{path}{_key(key)}.").strip()]
        elif _nested(value):
            lines += [line for table in value for line in ("", f"[[{path}{_key(key)}]]", _toml(table).strip())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """A string, number, boolean or list as TOML, which is written as in JSON but for one character that has to be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, tuple | list) and any(isinstance(one, Mapping) for one in value))


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)
