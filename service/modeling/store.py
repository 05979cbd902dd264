"""Reads and writes the weights of model folders, with every check. Never reads a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from service.errors import ModelError
from service.modeling.spec import (
    CARD,
    MODEL,
    TOKENIZER,
    WEIGHTS,
    ModelSpec,
    digest,
    model_folders,
    read,
    read_aliases,
    read_verified,
    version_folders,
    versions_by_folder,
)
from service.modeling.stored_weights import from_stored, tensor_forms, to_stored, wrong_values


def read_arrays(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Return the arrays of a version folder, on the CPU; raises ModelError unless it has exactly the tensors of `spec`.

    The matrices of an int8 model are float32, each a number times its scale.
    """
    return parse_arrays(folder / WEIGHTS, read_verified(folder / WEIGHTS, spec), spec)


def parse_arrays(file: Path, data: bytes, spec: ModelSpec) -> dict[str, Tensor]:
    """Return the arrays in the content of a weights file, as `read_arrays` does. file: the path for error messages."""
    try:
        stored = load(data)
    except SafetensorError as error:
        raise ModelError(f"{file} is not a complete safetensors file: {error}") from error
    _check(file, stored, spec)
    return from_stored(stored, spec)


def write(folder: Path, spec: ModelSpec, arrays: Mapping[str, Tensor], *, card: str, tokenizer: str | None = None) -> ModelSpec:
    """Write a version folder and return `spec` with the digests of its files; raises ModelError if the arrays do not match `spec`."""
    if folder.parent.name != spec.name:
        raise ModelError(f"the model is named {spec.name!r} and its folder {folder.parent.name!r}: use the same name for both")
    stored = to_stored(arrays, spec)
    _check(folder / WEIGHTS, stored, spec)
    files = {WEIGHTS: save(stored)} | ({TOKENIZER: tokenizer.encode()} if tokenizer is not None else {})
    signed = spec.model_copy(update={"sha256": {name: digest(data) for name, data in files.items()}})
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / CARD).write_text(card)
    (folder / MODEL).write_text(toml(signed.model_dump(exclude_defaults=True)))
    read(folder)
    return signed


def find_version(root: Path, model: str, version: int | None, alias: str = "") -> tuple[str, Path]:
    """Return the name of a model and the folder of a version, the newest for None; raises ModelError if there is none.

    model: a name or an alias; alias: of the only model, as SEQSERVE_ALIAS.
    """
    models = model_folders(root)
    only = {alias: next(iter(models))} if len(models) == 1 else {}
    aliases = {} if model in models else only | read_aliases(root, versions_by_folder(root))
    name, _, pinned = aliases.get(model, model).partition("/")
    if name not in models:
        raise ModelError(f"{root} has no model {model!r}: the models are {', '.join(models)}")
    found = version_folders(models[name], name)
    versions = {pinned: found[pinned]} if pinned else found
    if version is not None and str(version) not in versions:
        raise ModelError(f"{model} has no version {version}: the versions are {', '.join(versions)}")
    return name, versions[list(versions)[-1] if version is None else str(version)]


def _check(file: Path, tensors: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Raise ModelError unless `tensors` have the names, shapes and dtypes that `spec` describes, and valid values."""
    forms = tensor_forms(spec)
    for name in sorted(forms.keys() | tensors.keys()):
        if name not in tensors:
            raise ModelError(f"{file}: the tensor {name} of shape {forms[name].shape} is missing")
        if name not in forms:
            raise ModelError(f"{file}: the tensor {name} belongs to no layer of {MODEL}")
        tensor, form = tensors[name], forms[name]
        if tuple(tensor.shape) != form.shape:
            raise ModelError(f"{file}: {name} has shape {tuple(tensor.shape)}, {MODEL} requires {form.shape}")
        if tensor.dtype != form.dtype:
            raise ModelError(
                f"{file}: {name} is {tensor.dtype}, the precision {spec.precision} in {MODEL} requires {form.dtype}"
            )
        wrong = wrong_values(name, tensor)
        if wrong is not None:
            raise ModelError(f"{file}: {name} {wrong}")


def toml(values: Mapping[str, Any], path: str = "") -> str:
    """Return nested tables as TOML, plain values before tables as TOML requires."""
    values = dict(sorted(values.items(), key=lambda pair: pair[0] != "kind"))  # `kind` comes first
    lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not _nested(value, path)]
    for key, value in values.items():
        name = f"{path}{_key(key)}"
        if isinstance(value, Mapping) and _nested(value, path):
            lines += ["", f"[{name}]", toml(value, f"{name}.").strip()]
        elif _nested(value, path):
            lines += [line for table in value for line in ("", f"[[{name}]]", toml(table, f"{name}.").strip())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return a string, number, boolean, list or table on one line as TOML. TOML writes strings as JSON does, except for a
    character that needs an escape."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _nested(value: Any, path: str) -> bool:
    """Return whether a value becomes a separate table or several tables. A table within a table, such as an activation,
    stays on its line."""
    if isinstance(value, Mapping):
        return not path
    return isinstance(value, tuple | list) and any(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)
