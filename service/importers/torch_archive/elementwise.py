"""Translates elementwise operators of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from service.importers.chain import operations
from service.importers.chain.functions import Function, identify
from service.importers.draft import ImportRefused
from service.importers.torch_archive.operation import ArchiveOperation

FUNCTIONS = (
    *("abs", "celu", "clamp", "clamp_max", "clamp_min", "elu", "erf", "exp", "gelu", "hardsigmoid", "hardswish", "hardtanh"),
    *(
        "leaky_relu",
        "log",
        "mish",
        "reciprocal",
        "relu",
        "relu6",
        "rsqrt",
        "selu",
        "sigmoid",
        "silu",
        "softplus",
        "sqrt",
        "tanh",
    ),
    "threshold",
)
"""Functions of a number that are activations, or part of them."""
COMPARISONS = {"gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual", "eq": "Equal"}
BINARY = {
    **COMPARISONS,
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "pow": "Pow",
    "maximum": "Max",
    "minimum": "Min",
}


def function(operation: ArchiveOperation) -> Any:
    """Apply an operator to single numbers as torch computes it, under the name of the activation if it is one."""
    _, *others = operation.call.arguments.values()
    if any(not isinstance(value, bool | int | float | str | None) for value in others):
        raise ImportRefused("it computes with tensors besides its input")
    of_number = Function(lambda x: np.asarray(operation.compute(torch.from_numpy(x.copy()))))
    return operations.apply(operation.x, replace(of_number, activation=identify(of_number)), operation.call.name)


def binary(operation: ArchiveOperation) -> Any:
    call = operation.call
    first, second = call["self"], call.get("other", call.get("exponent"))
    if call.get("alpha", 1) != 1:
        raise ImportRefused("it has a factor of its own: multiply the weights by it")
    if call.get("rounding_mode") is not None:
        raise ImportRefused("it rounds its result")
    number = float(second) if isinstance(second, int) else second
    return operation.onnx(BINARY[call.name.rstrip("_")], first, number)


def from_number(operation: ArchiveOperation) -> Any:
    """rsub: a number minus the tensor."""
    if operation["alpha"] != 1:
        raise ImportRefused("it has a factor of its own")
    number = operation["other"]
    return operation.onnx("Sub", float(number) if isinstance(number, int) else number, operation["self"])


def glu(operation: ArchiveOperation) -> Any:
    return operations.glu(operation.x, operation["dim"] % operation.x.rank, operation.call.name)


def choice(operation: ArchiveOperation) -> Any:
    first, second = (float(value) if isinstance(value, int) else value for value in (operation["self"], operation["other"]))
    return operation.onnx("Where", operation["condition"], first, second)


OPERATORS: dict[str, Callable[[ArchiveOperation], Any]] = {
    **dict.fromkeys(FUNCTIONS, function),
    **dict.fromkeys(BINARY, binary),
    "glu": glu,
    "rsub": from_number,
    "where": choice,
}
