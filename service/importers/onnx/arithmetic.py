"""Translates elementwise operators: activations, and sums and products with constants or other tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from service.importers.chain import operations
from service.importers.chain.functions import Function, Numbers, affine, named
from service.importers.chain.signal import Signal
from service.importers.chain.values import Constant, Lengths, Value
from service.importers.draft import ImportRefused
from service.importers.onnx.masks import mean_of_sum, steps_below, without_padding
from service.importers.onnx.operation import Operation
from service.modeling.spec.activations import ONNX, PARAMETERS

Calculation = Callable[[Numbers, Numbers], Numbers]
_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS = {name: kind for kind, name in ONNX.items()} | {"Swish": "silu", "Celu": "elu"}
FUNCTIONS: dict[str, Callable[[Numbers], Numbers]] = {
    "Abs": np.abs,
    "Erf": _erf,
    "Log": np.log,
    "Not": lambda x: (x == 0).astype(np.float64),
    "Reciprocal": np.reciprocal,
    "Sqrt": np.sqrt,
}
"""Functions of a number that are part of activations."""
COMPARISONS: dict[str, Calculation] = {
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
}
COMBINATIONS = {"Add": "add", "Sub": "subtract", "Mul": "multiply", "Div": "divide", "Max": "maximum", "Min": "minimum"}
"""Operators that combine two numbers, by their names here."""
AFFINE = ("Add", "Sub", "Mul", "Div")
CALCULATIONS: dict[str, Calculation] = {
    **{name: operations.OPERATIONS[ours] for name, ours in COMBINATIONS.items()},
    **COMPARISONS,
    "Mod": np.mod,
    "Pow": np.power,
}


def activation(operation: Operation) -> Value:
    kind = ACTIVATIONS[operation.node.op_type]
    values = {name: float(operation.attributes.get(name, default)) for name, default in PARAMETERS.get(kind, {}).items()}
    if operation.node.op_type == "Celu" and values["alpha"] != 1:
        raise ImportRefused(f"its alpha is {values['alpha']}: of the celu, only alpha = 1 can be imported")
    return operations.apply(operation.signal, named(kind, **values), operation.label)


def selu(operation: Operation) -> Value:
    alpha = float(operation.attributes.get("alpha", 1.6732632423543772))
    gamma = float(operation.attributes.get("gamma", 1.0507009873554805))
    selu = Function(lambda x: gamma * np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x))
    return operations.apply(operation.signal, selu, operation.label)


def gelu(operation: Operation) -> Value:
    is_exact = operation.attributes.get("approximate", "none") == "none"
    return operations.apply(operation.signal, named("gelu" if is_exact else "gelu_tanh"), operation.label)


def hard_swish(operation: Operation) -> Value:
    return operations.apply(operation.signal, Function(lambda x: x * np.clip(x / 6 + 0.5, 0, 1)), operation.label)


def function(operation: Operation) -> Value:
    return operations.apply(operation.signal, Function(FUNCTIONS[operation.node.op_type]), operation.label)


def negative(operation: Operation) -> Value:
    return operations.apply(operation.signal, affine(-1.0, 0.0), operation.label)


def clip(operation: Operation) -> Value:
    low, high = (_bound(operation, index, name) for index, name in ((1, "min"), (2, "max")))
    return operations.apply(
        operation.signal,
        Function(lambda x: np.clip(x, -math.inf if low is None else low, math.inf if high is None else high)),
        operation.label,
    )


def prelu(operation: Operation) -> Value:
    return operations.prelu(operation.signal, operation.weights(1, "slope"), operation.label, operation.origins)


def calculation(operation: Operation) -> Value:
    first, second = operation.inputs[0], operation.inputs[1]
    name = operation.node.op_type
    if isinstance(first, Signal) and isinstance(second, Signal):
        if name not in COMBINATIONS:
            raise ImportRefused("it compares numbers that depend on the input")
        return operations.combine(first, second, COMBINATIONS[name], operation.label)
    if isinstance(first, Lengths) and isinstance(second, Constant) and name in ("Add", "Sub") and second.array.size == 1:
        return Lengths(first.name, first.plus + int(second.array.item()) * (1 if name == "Add" else -1))
    if isinstance(first, Constant) and isinstance(second, Lengths):
        return steps_below(operation, first, second)
    if isinstance(first, Signal) and isinstance(second, Lengths):
        return mean_of_sum(operation, first, second)
    if isinstance(first, Signal) and isinstance(second, Constant):
        calculate, is_affine = CALCULATIONS[name], name in AFFINE
        return operations.with_constant(first, second.array, calculate, operation.label, operation.origins, is_affine=is_affine)
    if isinstance(second, Signal) and isinstance(first, Constant):
        calculate, is_affine = (lambda x, y: CALCULATIONS[name](y, x)), name in AFFINE and name != "Div"
        return operations.with_constant(second, first.array, calculate, operation.label, operation.origins, is_affine=is_affine)
    raise ImportRefused("it computes with lengths, states or masks, which no layer of model.toml does")


def choice(operation: Operation) -> Value:
    """Choose between two numbers by a condition: x where x > 0, and 0 elsewhere, is relu."""
    condition = operation.inputs[0]
    if not isinstance(condition, Signal):
        return without_padding(operation)
    negated = operations.apply(condition, affine(-1.0, 1.0), operation.label)
    chosen, other = (_times(operation, operation.inputs[index], each) for index, each in ((1, condition), (2, negated)))
    return operations.combine(chosen, other, "add", operation.label)


def _times(operation: Operation, value: Value | None, condition: Signal) -> Signal:
    """Multiply a tensor or one constant by a condition, which is 1 or 0."""
    if isinstance(value, Constant) and value.array.size == 1:
        return operations.apply(condition, affine(float(value.array.item()), 0.0), operation.label)
    if not isinstance(value, Signal):
        raise ImportRefused("it chooses between numbers that do not depend on the input, or are not one for all")
    return operations.combine(value, condition, "multiply", operation.label)


def _bound(operation: Operation, index: int, name: str) -> float | None:
    if operation.has(index):
        return float(operation.constant(index, name))
    bound = operation.attributes.get(name)
    return None if bound is None else float(bound)


OPERATORS: dict[str, Callable[[Operation], Value]] = {
    **dict.fromkeys(ACTIVATIONS, activation),
    **dict.fromkeys(FUNCTIONS, function),
    **dict.fromkeys(CALCULATIONS, calculation),
    "Clip": clip,
    "Gelu": gelu,
    "HardSwish": hard_swish,
    "Neg": negative,
    "PRelu": prelu,
    "Selu": selu,
    "Where": choice,
}
