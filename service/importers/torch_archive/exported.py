"""Reads programs of torch.export.save: .pt2 archives. torch.export.load evaluates text of the archive as code, so it is not used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from service.importers.draft import ImportRefused, refusing
from service.importers.torch_archive.archive import Archive
from service.importers.torch_archive.program import Machine, ProgramInput
from service.importers.torch_archive.scalars import ARITHMETIC

MODEL = "models/model.json"
SCHEMA = 8
"""The major version of the description that is read."""
ATEN = "torch.ops.aten."
SCALAR_TYPES = {
    **{getattr(torch, name): number for number, name in enumerate(("uint8", "int8", "int16", "int32", "int64"))},
    **{getattr(torch, name): number for number, name in enumerate(("float16", "float32", "float64"), 5)},
    torch.bool: 11,
    torch.bfloat16: 15,
}
"""Types of numbers by their numbers in schemas of operators."""
TYPES = {12 if dtype is torch.bool else min(number + 1, 13): dtype for dtype, number in SCALAR_TYPES.items()}
"""Types of numbers by their numbers in an archive."""
CHECKS = ("_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")


class ExportedProgram:
    """The graph of an archive with its weights."""

    def __init__(self, archive: Archive) -> None:
        content = _described(archive, MODEL)
        version = content["schema_version"]["major"]
        if version != SCHEMA:
            raise ImportRefused(
                f"the archive has schema {version}, and {SCHEMA} is read: save it again with torch {torch.__version__}"
            )
        module = content["graph_module"]
        self._graph = module["graph"]
        self.inputs: list[ProgramInput] = []
        self.weights: dict[str, Tensor] = {}
        self._weight_of: dict[str, str] = {}
        tensors = _tensors(archive, "weights") | _tensors(archive, "constants")
        for spec in module["signature"]["input_specs"]:
            self._add_input(spec, tensors)
        outputs = [spec["user_output"]["arg"] for spec in module["signature"]["output_specs"] if "user_output" in spec]
        self._output = outputs[0]

    def run(self, machine: Machine, inputs: Mapping[str, Any]) -> Any:
        values = dict(inputs)
        for name, weight in self._weight_of.items():
            values[name] = machine.constant(weight, self.weights[weight])
        for node in self._graph["nodes"]:
            result = self._result(node, values, machine)
            outputs = [_names(output) for output in node["outputs"]]
            if len(outputs) == 1 and isinstance(outputs[0], str):
                values[outputs[0]] = result
                continue
            flat = [name for output in outputs for name in ([output] if isinstance(output, str) else output)]
            values.update({name: value for name, value in zip(flat, result or [], strict=False) if name})
        return _argument(self._output, values)

    def _add_input(self, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        [(kind, content)] = spec.items()
        if kind == "user_input":
            name = content["arg"].get("as_tensor", {}).get("name")
            if name is None:
                return
            meta = self._graph["tensor_values"][name]
            shape = tuple(size.get("as_int") for size in meta["sizes"])
            self.inputs.append(ProgramInput(name, not TYPES[meta["dtype"]].is_floating_point, shape))
            return
        names = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
        if kind not in names:
            raise ImportRefused(f"the program has an input of the kind {kind}, which is not read")
        name = content[names[kind]]
        self._weight_of[content["arg"]["name"]] = name
        self.weights[name] = tensors[name]

    def _result(self, node: Mapping[str, Any], values: Mapping[str, Any], machine: Machine) -> Any:
        target = node["target"]
        arguments = [(entry["name"], _argument(entry["arg"], values)) for entry in node["inputs"]]
        if target.startswith(ATEN):
            name, _, overload = target.removeprefix(ATEN).partition(".")
            if name in CHECKS:
                return None
            if name == "sym_size":
                return machine.size(arguments[0][1])[arguments[1][1]]
            return machine.operate(name, "" if overload == "default" else overload, [], dict(arguments))
        plain = target.removeprefix("_operator.")
        if plain in ARITHMETIC:
            return ARITHMETIC[plain](*(value for _, value in arguments))
        raise ImportRefused(f"the program calls {target}, which cannot be imported: only operators of torch itself can")


def _described(archive: Archive, name: str) -> Any:
    with refusing((ValueError, RecursionError), f"{name} of the archive is damaged", "save it again"):
        return json.loads(archive.read(name))


def _tensors(archive: Archive, kind: str) -> dict[str, Tensor]:
    """Return the weights or the constants of an archive."""
    description = f"data/{kind}/model_{kind}_config.json"
    if description not in archive:
        return {}
    tensors = {}
    for name, entry in _described(archive, description)["config"].items():
        if entry["use_pickle"]:
            raise ImportRefused(f"{name} of the archive is a pickle, which is not read: save plain tensors")
        meta = entry["tensor_meta"]
        shape, strides = ([size["as_int"] for size in meta[key]] for key in ("sizes", "strides"))
        dtype = TYPES[meta["dtype"]]
        tensors[name] = archive.tensor(
            f"data/{kind}/{entry['path_name']}", dtype, shape, strides, meta["storage_offset"]["as_int"]
        )
    return tensors


def _argument(argument: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return an argument of a node: a value of an earlier node, or a constant in the description."""
    [(kind, content)] = argument.items()
    if kind == "as_none":
        return None
    if kind in ("as_tensor", "as_name"):
        return values[content["name"] if kind == "as_tensor" else content]
    if kind in ("as_tensors", "as_nested_tensors"):
        return [values[item["name"]] for item in content]
    if kind == "as_optional_tensors":
        return [_argument(item, values) for item in content]
    if kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
        return _argument(content, values)
    if kind in ("as_sym_ints", "as_sym_bools", "as_sym_floats"):
        return [_argument(item, values) for item in content]
    if kind == "as_scalar_type":
        return SCALAR_TYPES[TYPES[content]]
    if kind in ("as_int", "as_ints", "as_float", "as_floats", "as_bool", "as_bools", "as_string", "as_strings"):
        return content
    if kind in ("as_device", "as_memory_format", "as_layout"):
        return None
    raise ImportRefused(f"the program has an argument of the kind {kind}, which is not read")


def _names(output: Mapping[str, Any]) -> str | list[str]:
    """Return the name of an output, or the names of its items."""
    [(kind, content)] = output.items()
    if kind == "as_tensors":
        return [item["name"] for item in content]
    if kind in ("as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float"):
        return str(content.get("name") or content.get("as_name"))
    return ""
