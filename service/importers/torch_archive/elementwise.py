"""Translates elementwise operators of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from service.importers.chain import operations
from service.importers.chain.functions import Function, named
from service.importers.draft import ImportRefused
from service.importers.torch_archive.operation import ArchiveOperation

PLAIN = {
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "softsign": "Softsign",
    "exp": "Exp",
    "abs": "Abs",
    "neg": "Neg",
    "erf": "Erf",
    "hardswish": "HardSwish",
    "log": "Log",
    "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
}
"""Operators without parameters, with the operators of ONNX that compute the same."""
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


def plain(operation: ArchiveOperation) -> Any:
    return operation.onnx(PLAIN[operation.call.name.rstrip("_")], operation.x)


def apply(function: Function) -> Callable[[ArchiveOperation], Any]:
    """Return the translation of an operator without parameters to a function."""

    def translate(operation: ArchiveOperation) -> Any:
        return operations.apply(operation.x, function, operation.call.name)

    return translate


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


def elu(operation: ArchiveOperation) -> Any:
    alpha, scale, inner = (float(operation.call.get(name, 1)) for name in ("alpha", "scale", "input_scale"))
    return _function(operation, lambda x: scale * np.where(x > 0, x, alpha * np.expm1(inner * np.minimum(x, 0))))


def celu(operation: ArchiveOperation) -> Any:
    alpha = float(operation["alpha"])
    return _function(operation, lambda x: np.maximum(x, 0) + np.minimum(alpha * np.expm1(np.minimum(x, 0) / alpha), 0))


def leaky_relu(operation: ArchiveOperation) -> Any:
    return operations.apply(operation.x, named("leaky_relu", alpha=float(operation["negative_slope"])), operation.call.name)


def gelu(operation: ArchiveOperation) -> Any:
    kind = "gelu_tanh" if operation["approximate"] == "tanh" else "gelu"
    return operations.apply(operation.x, named(kind), operation.call.name)


def softplus(operation: ArchiveOperation) -> Any:
    if operation["beta"] != 1:
        raise ImportRefused(f"its beta is {operation['beta']}, and only 1 can be imported")
    return operation.onnx("Softplus", operation.x)


def clamp(operation: ArchiveOperation) -> Any:
    call = operation.call
    limits = [call.get(name, call.get(f"{name}_val")) for name in ("min", "max")]
    if any(limit is not None and not isinstance(limit, int | float) for limit in limits):
        raise ImportRefused("its limits are tensors")
    low, high = (
        default if limit is None else float(limit) for limit, default in zip(limits, (-math.inf, math.inf), strict=True)
    )
    return _function(operation, lambda x: np.clip(x, low, high))


def threshold(operation: ArchiveOperation) -> Any:
    limit, value = float(operation["threshold"]), float(operation["value"])
    return _function(operation, lambda x: np.where(x > limit, x, value))


def prelu(operation: ArchiveOperation) -> Any:
    return operation.onnx("PRelu", operation.x, operation["weight"])


def glu(operation: ArchiveOperation) -> Any:
    return operations.glu(operation.x, operation["dim"] % operation.x.rank, operation.call.name)


def choice(operation: ArchiveOperation) -> Any:
    first, second = (float(value) if isinstance(value, int) else value for value in (operation["self"], operation["other"]))
    return operation.onnx("Where", operation["condition"], first, second)


def _function(operation: ArchiveOperation, function: Callable[[Any], Any]) -> Any:
    return operations.apply(operation.x, Function(function), operation.call.name)


OPERATORS: dict[str, Callable[[ArchiveOperation], Any]] = {
    **dict.fromkeys(PLAIN, plain),
    **dict.fromkeys(BINARY, binary),
    "celu": celu,
    "clamp": clamp,
    "clamp_min": clamp,
    "clamp_max": clamp,
    "elu": elu,
    "gelu": gelu,
    "glu": glu,
    "hardsigmoid": apply(named("hard_sigmoid", alpha=1 / 6, beta=0.5)),
    "hardtanh": clamp,
    "leaky_relu": leaky_relu,
    "mish": apply(Function(lambda x: x * np.tanh(np.logaddexp(0, x)))),
    "prelu": prelu,
    "relu6": apply(named("relu6")),
    "rsqrt": apply(Function(lambda x: 1 / np.sqrt(x))),
    "rsub": from_number,
    "selu": apply(named("selu")),
    "silu": apply(named("silu")),
    "softplus": softplus,
    "threshold": threshold,
    "where": choice,
}
