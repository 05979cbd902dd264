"""Translates functions of keras.ops, which Keras 3 writes into functional models as operations between layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from service.importers.chain import operations
from service.importers.chain.functions import Function, named
from service.importers.chain.signal import Role
from service.importers.draft import ImportRefused
from service.importers.keras.activations import NAMED, SLOPES, softmax
from service.importers.keras.call import KerasCall, KerasTensor, Value
from service.importers.keras.shapes import COMBINATIONS, combine, concat
from service.modeling.spec.activations import class_name

REDUCTIONS = {"Sum": "sum", "Mean": "mean", "Max": "max"}
SLICE, ELLIPSIS = "__slice__", "__ellipsis__"
WITH_ALPHA = {"LeakyRelu": ("leaky_relu", "negative_slope"), "Elu": ("elu", "alpha")}
"""Activations with a parameter: their names in model.toml, and the name of the parameter in Keras."""


def elementwise(call: KerasCall) -> KerasTensor:
    return call.result(operations.apply(call.signal, _function(call), call.label))


def reduce_steps(call: KerasCall) -> KerasTensor:
    x = call.signal
    at = call.axis(x.rank)
    if not x.is_on(at, Role.STEPS):
        raise ImportRefused(f"it reduces the axis of {x.axes[at]}, and a pool reduces the steps")
    if call.layer.kind != "Mean" or not call.tensor.is_masked:
        call.ignores_mask()
    return KerasTensor(operations.pool_steps(x, REDUCTIONS[call.layer.kind], keep_axis=call.flag("keepdims", False)))


def get_item(call: KerasCall) -> KerasTensor:
    """x[:, -1], x[..., :3] and the like."""
    tensor = call.inputs[0] if call.inputs else None
    if not isinstance(tensor, KerasTensor):
        raise ImportRefused("it takes entries of a tensor that is not the output of a layer")
    x = tensor.signal
    chosen = _indexes(call, x.rank)
    for at in reversed(range(x.rank)):
        x = operations.take(x, at, chosen[at])
    return KerasTensor(x, tensor.is_masked and x.has_steps)


def product(call: KerasCall) -> KerasTensor:
    first, second = (tensor.signal for tensor in call.pair())
    return KerasTensor(operations.product_over_steps(first, second, call.label))


def dot(call: KerasCall) -> KerasTensor:
    """The layer Dot over the steps: (batch, steps, columns) with (batch, steps, 1)."""
    call.refuse_options(normalize=False)
    first, second = (tensor.signal for tensor in call.pair())
    if call.value("axes") not in (1, [1, 1]) or first.rank != 3:
        raise ImportRefused(
            f"its axes are {call.value('axes')!r:.20}, and only an attention pool multiplies two tensors, over the steps"
        )
    return KerasTensor(operations.product_over_steps(first.transpose([0, 2, 1]), second, call.label))


def transpose(call: KerasCall) -> KerasTensor:
    x = call.signal
    order = list(range(x.rank))[::-1] if call.value("axes", None) is None else call.integers("axes")
    if sorted(order) != list(range(x.rank)):
        raise ImportRefused(f"its axes are {order!r:.60}, and its input has {x.rank} axes")
    return call.result(x.transpose(order))


def reshape(call: KerasCall) -> KerasTensor:
    """The batch, the first axis, is written as -1."""
    x, target = call.signal, call.integers("newshape")
    if target[:1] != [-1] or math.prod(target[1:]) != math.prod(x.shape[1:]) or min(target[1:], default=1) < 1:
        raise ImportRefused(
            f"it makes the shape {target!r:.60} of {x.shape[1:]} for each sequence of the batch, whose axis is -1"
        )
    return call.result(x.reshape([x.shape[0], *target[1:]]))


def _function(call: KerasCall) -> Function:
    kind = call.layer.kind
    if kind in WITH_ALPHA:
        ours, parameter = WITH_ALPHA[kind]
        return named(ours, alpha=call.number(parameter))
    if kind == "Gelu":
        return named("gelu_tanh" if call.flag("approximate", True) else "gelu")
    return ELEMENTWISE[kind]


def _indexes(call: KerasCall, rank: int) -> list[Any]:
    """Return an index or a slice for each axis."""
    written = call.node.options.get("slice_spec", call.node.arguments[1] if len(call.node.arguments) > 1 else None)
    given = [_index(item) for item in (written if isinstance(written, list) else [written])]
    if given.count(...) > 1 or len(given) > rank + (... in given):
        raise ImportRefused(f"it takes entries along {len(given)} axes, and its input has {rank}")
    at = given.index(...) if ... in given else len(given)
    before, after = given[:at], given[at + 1 :]
    return [*before, *[slice(None)] * (rank - len(before) - len(after)), *after]


def _index(item: Any) -> Any:
    """Return an index, a slice, or an ellipsis. Keras 2 writes a slice without the name of its class."""
    if isinstance(item, dict) and item.get("class_name") == ELLIPSIS:
        return ...
    bounds_of = item.get("config", item) if isinstance(item, dict) and item.get("class_name", SLICE) == SLICE else None
    if isinstance(bounds_of, dict):
        bounds = [bounds_of.get(name) for name in ("start", "stop", "step")]
        if all(bound is None or isinstance(bound, int) for bound in bounds) and bounds[2] != 0:
            return slice(*bounds)
    if isinstance(item, int) and not isinstance(item, bool):
        return item
    raise ImportRefused("it takes entries in another way than by numbers and slices")


ELEMENTWISE = {class_name(name): function for name, function in NAMED.items()}
ELEMENTWISE |= {"Exp": NAMED["exponential"], "HardSigmoid": SLOPES[False]}
"""Functions of single numbers, by the names of their classes."""
OPERATIONS: dict[str, Callable[[KerasCall], Value]] = {
    **dict.fromkeys((*ELEMENTWISE, *WITH_ALPHA, "Gelu"), elementwise),
    **dict.fromkeys(REDUCTIONS, reduce_steps),
    **dict.fromkeys(COMBINATIONS, combine),
    "Concatenate": concat,
    "ExpandDims": lambda call: call.result(call.signal.with_units([call.axis(call.signal.rank + 1)])),
    "Flip": lambda call: call.result(operations.take(call.signal, call.axis(call.signal.rank), slice(None, None, -1))),
    "GetItem": get_item,
    "LogSoftmax": softmax,
    "Matmul": product,
    "Reshape": reshape,
    "Softmax": softmax,
    "Squeeze": lambda call: call.result(call.signal.without_axes([call.axis(call.signal.rank)])),
    "Transpose": transpose,
}
