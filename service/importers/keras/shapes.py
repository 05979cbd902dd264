"""Translates layers without weights that move, join or combine tensors, and layers that do nothing at inference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import numpy as np

from service.importers.chain import combining, operations
from service.importers.chain.signal import concatenate
from service.importers.draft import ImportRefused
from service.importers.keras.call import KerasCall, KerasMask, KerasTensor, Value

IDENTITIES = (
    *("ActivityRegularization", "AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise", "Identity", "SpatialDropout1D"),
)
COMBINATIONS = {"Add": "add", "Subtract": "subtract", "Multiply": "multiply", "Maximum": "maximum", "Minimum": "minimum"}
"""Layers that combine tensors number by number. Functions of keras.ops have the same names."""

AFFINE = ("add", "subtract", "multiply")


def combine(call: KerasCall) -> KerasTensor:
    how = COMBINATIONS[call.layer.kind]
    if any(isinstance(value, float) for value in call.inputs):
        return _with_number(call, how)
    signals = [tensor.signal for tensor in call.tensors]
    return call.result(reduce(lambda x, y: combining.combine(x, y, how, call.label), signals))


def concat(call: KerasCall) -> KerasTensor:
    signals = [tensor.signal for tensor in call.tensors]
    return call.result(concatenate(signals, call.axis(signals[0].rank, -1)))


def flatten(call: KerasCall) -> KerasTensor:
    call.ignores_mask()
    x = call.signal
    return KerasTensor(x.reshape([x.shape[0], math.prod(x.shape[1:])]))


def reshape(call: KerasCall) -> KerasTensor:
    x, target = call.signal, call.integers("target_shape")
    if target.count(-1) > 1 or any(size < 1 for size in target if size != -1):
        raise ImportRefused(f"its target_shape is {target!r:.60}")
    known = math.prod(size for size in target if size != -1)
    sizes = [size if size != -1 else math.prod(x.shape[1:]) // known for size in target]
    return call.result(x.reshape([x.shape[0], *sizes]))


def permute(call: KerasCall) -> KerasTensor:
    x, order = call.signal, call.integers("dims")
    if sorted(order) != list(range(1, x.rank)):
        raise ImportRefused(f"its dims are {order!r:.60}, and its input has {x.rank} axes")
    return call.result(x.transpose([0, *order]))


def pad(call: KerasCall) -> KerasTensor:
    call.ignores_mask()
    return KerasTensor(operations.pad_steps(call.over_steps(), *_pair(call, "padding")))


def crop(call: KerasCall) -> KerasTensor:
    call.ignores_mask()
    return KerasTensor(operations.cut_steps(call.over_steps(), *_pair(call, "cropping")))


def mask(call: KerasCall) -> Value:
    """NotEqual, an operation that Keras 3 writes into functional models, makes their masks."""
    call.reading.lengths = True
    return KerasMask()


def _with_number(call: KerasCall, how: str) -> KerasTensor:
    """Combine a tensor with a number."""
    calculate, is_affine = combining.OPERATIONS[how], how in AFFINE
    match call.inputs:
        case [KerasTensor() as tensor, float(number)]:
            x = operations.with_constant(tensor.signal, np.array(number), calculate, call.label, is_affine=is_affine)
        case [float(number), KerasTensor() as tensor]:
            x = operations.with_constant(
                tensor.signal, np.array(number), lambda x, y: calculate(y, x), call.label, is_affine=is_affine
            )
        case _:
            raise ImportRefused("it takes something else than a tensor and a number")
    return call.result(x)


def _pair(call: KerasCall, key: str) -> tuple[int, int]:
    value = call.value(key)
    pair = [value, value] if isinstance(value, int) else value
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(size, int) and size >= 0 for size in pair):
        raise ImportRefused(f"its {key} is {value!r:.60}")
    return pair[0], pair[1]


LAYERS: dict[str, Callable[[KerasCall], Value]] = {
    **dict.fromkeys(IDENTITIES, lambda call: call.tensor),
    **dict.fromkeys(COMBINATIONS, combine),
    "Average": lambda call: call.result(operations.mean([tensor.signal for tensor in call.tensors], call.label)),
    "Concatenate": concat,
    "Cropping1D": crop,
    "Flatten": flatten,
    "Permute": permute,
    "Reshape": reshape,
    "ZeroPadding1D": pad,
}
