"""Translates elementwise operators: activations, and sums and products with constants or other tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.importers.chain import combining, operations
from service.importers.chain.functions import Function, Numbers, affine, named
from service.importers.chain.signal import Signal
from service.importers.chain.values import Constant, Lengths, Value
from service.importers.draft import ImportRefused
from service.importers.onnx.folding import evaluator
from service.importers.onnx.masks import mean_of_sum, steps_below, without_padding
from service.importers.onnx.operation import Operation
from service.modeling.spec.activations import ONNX, PARAMETERS

ACTIVATIONS = {name: kind for kind, name in ONNX.items()} | {"Swish": "silu", "Celu": "elu"}
FUNCTIONS = ("Abs", "Clip", "Erf", "Gelu", "HardSwish", "Log", "Not", "Reciprocal", "Selu", "Sqrt")
"""Functions of a number that are activations, or part of them."""
COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
COMBINATIONS = {"Add": "add", "Sub": "subtract", "Mul": "multiply", "Div": "divide", "Max": "maximum", "Min": "minimum"}
"""Operators that combine two numbers, by their names here."""
AFFINE = ("Add", "Sub", "Mul", "Div")


def activation(operation: Operation) -> Value:
    kind = ACTIVATIONS[operation.node.op_type]
    values = {name: float(operation.attributes.get(name, default)) for name, default in PARAMETERS.get(kind, {}).items()}
    if operation.node.op_type == "Celu" and values["alpha"] != 1:
        raise ImportRefused(f"its alpha is {values['alpha']}: of the celu, only alpha = 1 can be imported")
    return operations.apply(operation.signal, named(kind, **values), operation.label)


def function(operation: Operation) -> Value:
    """Apply an operator to single numbers as ONNX defines it."""
    x = operation.signal
    constants = [
        operation.constant(index, "bound") if operation.has(index) else None for index in range(1, len(operation.inputs))
    ]
    evaluate = evaluator(operation.node, operation.inputs, operation.reading.opset)
    of_number = Function(lambda numbers: np.asarray(evaluate([numbers, *constants])[0], np.float64))
    return operations.apply(x, of_number, operation.label)


def calculation(operation: Operation) -> Value:
    first, second = operation.inputs[0], operation.inputs[1]
    name = operation.node.op_type
    if isinstance(first, Signal) and isinstance(second, Signal):
        if name not in COMBINATIONS:
            raise ImportRefused("it compares numbers that depend on the input")
        return combining.combine(first, second, COMBINATIONS[name], operation.label)
    if isinstance(first, Lengths) and isinstance(second, Constant) and name in ("Add", "Sub") and second.array.size == 1:
        return Lengths(first.name, first.plus + int(second.array.item()) * (1 if name == "Add" else -1))
    if isinstance(first, Constant) and isinstance(second, Lengths):
        return steps_below(operation, first, second)
    if isinstance(first, Signal) and isinstance(second, Lengths):
        return mean_of_sum(operation, first, second)
    if isinstance(first, Signal) and isinstance(second, Constant):
        return _with_constant(operation, first, second, is_affine=name in AFFINE)
    if isinstance(second, Signal) and isinstance(first, Constant):
        return _with_constant(operation, second, first, is_affine=name in AFFINE and name != "Div")
    raise ImportRefused("it computes with lengths, states or masks, which no layer of model.toml does")


def choice(operation: Operation) -> Value:
    """Choose between two numbers by a condition: x where x > 0, and 0 elsewhere, is relu."""
    condition = operation.inputs[0]
    if not isinstance(condition, Signal):
        return without_padding(operation)
    negated = operations.apply(condition, affine(-1.0, 1.0), operation.label)
    chosen, other = (_times(operation, operation.inputs[index], each) for index, each in ((1, condition), (2, negated)))
    return combining.combine(chosen, other, "add", operation.label)


def _times(operation: Operation, value: Value | None, condition: Signal) -> Signal:
    """Multiply a tensor or one constant by a condition, which is 1 or 0."""
    if isinstance(value, Constant) and value.array.size == 1:
        return operations.apply(condition, affine(float(value.array.item()), 0.0), operation.label)
    if not isinstance(value, Signal):
        raise ImportRefused("it chooses between numbers that do not depend on the input, or are not one for all")
    return combining.combine(value, condition, "multiply", operation.label)


def _with_constant(operation: Operation, x: Signal, constant: Constant, *, is_affine: bool) -> Value:
    evaluate = evaluator(operation.node, operation.inputs, operation.reading.opset)

    def calculate(x: Numbers, number: Numbers) -> Numbers:
        return evaluate([x, np.asarray(number)] if constant is operation.inputs[1] else [np.asarray(number), x])[0]

    return operations.with_constant(x, constant.array, calculate, operation.label, operation.origins, is_affine=is_affine)


OPERATORS: dict[str, Callable[[Operation], Value]] = {
    **dict.fromkeys(ACTIVATIONS, activation),
    **dict.fromkeys(FUNCTIONS, function),
    **dict.fromkeys((*COMBINATIONS, *COMPARISONS, "Mod", "Pow"), calculation),
    "Neg": lambda operation: operations.apply(operation.signal, affine(-1.0, 0.0), operation.label),
    "PRelu": lambda operation: operations.prelu(
        operation.signal, operation.weights(1, "slope"), operation.label, operation.origins
    ),
    "Where": choice,
}
