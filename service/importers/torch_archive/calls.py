"""Binds calls of torch's operators: finds the overload, and its arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from service.importers.draft import ImportRefused

IGNORED = ("layout", "device", "pin_memory", "memory_format", "non_blocking", "copy", "generator")
"""Arguments that do not change a result on a CPU."""
IsTensor = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of an operator. name: such as `linear`; overload: such as `int`, or empty; arguments: all of them, by name."""

    name: str
    overload: str
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)


def bound(
    name: str, overload: str | None, positional: Sequence[Any], named: Mapping[str, Any], is_tensor: IsTensor
) -> OperatorCall:
    """Return the call of the first overload whose parameters fit the arguments. overload: its name, or None if it is unknown."""
    known = overload is not None

    def fits(value: Any) -> bool:
        return is_tensor(value) or (known and isinstance(value, int | float))  # torch takes numbers for tensors as well

    for schema in _schemas(name):
        if overload is None or schema.overload_name == overload:
            arguments = _arguments(schema, positional, named, fits)
            if arguments is not None:
                return OperatorCall(name, schema.overload_name, arguments)
    raise ImportRefused(
        f"torch has no operator {name} with these arguments: save the archive again with torch {torch.__version__}"
    )


@cache
def _schemas(name: str) -> list[Any]:
    schemas: list[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return [schema for schema in schemas if not any(argument.is_out for argument in schema.arguments)]


def _arguments(schema: Any, positional: Sequence[Any], named: Mapping[str, Any], is_tensor: IsTensor) -> dict[str, Any] | None:
    """Return the arguments of a schema by name, or None if it has other parameters."""
    parameters = schema.arguments
    places = [parameter for parameter in parameters if not parameter.kwarg_only]
    if len(positional) > len(places):
        return None
    given = {parameter.name: value for parameter, value in zip(places, positional, strict=False)}
    if given.keys() & named.keys() or not named.keys() <= {parameter.name for parameter in parameters}:
        return None
    given |= named
    arguments = {}
    for parameter in parameters:
        if parameter.name not in given and not parameter.has_default_value():
            return None
        value = given.get(parameter.name, parameter.default_value)
        if parameter.name not in IGNORED:
            if parameter.name in given and not _fits(value, str(parameter.type), is_tensor):
                return None
            arguments[parameter.name] = value
        elif not parameter.has_default_value():
            arguments[parameter.name] = "cpu" if parameter.name == "device" else None
    return arguments


def _fits(value: Any, kind: str, is_tensor: IsTensor) -> bool:
    """Whether a value is of a type of TorchScript."""
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[len("Optional[") : -1], is_tensor)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return (
            all(_fits(item, inner, is_tensor) for item in value)
            if isinstance(value, list | tuple)
            else _fits(value, inner, is_tensor)
        )
    if kind == "Tensor":
        return is_tensor(value)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind in ("float", "number", "Scalar"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) if kind == "str" else not is_tensor(value)
