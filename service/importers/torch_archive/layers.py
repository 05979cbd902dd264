"""Translates operators of torch with weights and pooling operators, through the operators of ONNX that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from service.importers.chain.signal import Signal
from service.importers.chain.values import Constant
from service.importers.draft import ImportRefused
from service.importers.torch_archive.operation import ArchiveOperation

AUTO_PADS = {"same": "SAME_UPPER", "valid": "VALID"}
REDUCTIONS = {"amax": "ReduceMax", "max": "ReduceMax", "mean": "ReduceMean", "sum": "ReduceSum"}


def conv(operation: ArchiveOperation) -> Any:
    call = operation.call
    kernel = operation.weights("weight")
    if call.get("transposed"):
        raise ImportRefused("it is a transposed convolution")
    count = kernel.ndim - 2
    x = operation["input"]
    without_batch = isinstance(x, Signal) and x.rank == count + 1
    strides, dilations = (_sizes(call[name], count) for name in ("stride", "dilation"))
    padding = call["padding"]
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations, "group": call["groups"]}
    if isinstance(padding, str):
        if padding not in AUTO_PADS:
            raise ImportRefused(f"its padding is {padding!r}")
        attributes["auto_pad"] = AUTO_PADS[padding]
    else:
        attributes["pads"] = _sizes(padding, count) * 2
    if without_batch:
        x = x.with_units([0])
    y = operation.onnx("Conv", x, operation["weight"], operation["bias"], **attributes)
    return y.without_axes([0]) if without_batch else y


def batch_norm(operation: ArchiveOperation) -> Any:
    call = operation.call
    if call.get("training") or call.get("train"):
        raise ImportRefused("it is in training mode: call module.eval() before you save it")
    count = operation.x.shape[1]
    ones, zeros = Constant(np.ones(count, np.float32)), Constant(np.zeros(count, np.float32))
    mean, variance = call["running_mean"], call["running_var"]
    if mean is None or variance is None:
        raise ImportRefused("it has no statistics of its own, and normalises by those of the batch")
    weights = [call["weight"] or ones, call["bias"] or zeros, mean, variance]
    return operation.onnx("BatchNormalization", operation.x, *weights, epsilon=call["eps"])


def layer_norm(operation: ArchiveOperation) -> Any:
    call = operation.call
    if len(call["normalized_shape"]) != 1:
        raise ImportRefused("it normalises several axes: only the last axis can be normalised")
    weight = call["weight"] or Constant(np.ones(call["normalized_shape"][0], np.float32))
    return operation.onnx("LayerNormalization", call["input"], weight, call["bias"], axis=-1, epsilon=call["eps"])


def pool(operation: ArchiveOperation) -> Any:
    """Pool windows of steps."""
    call = operation.call
    is_max = call.name.startswith("max")
    x = operation.x
    count = 2 if "2d" in call.name else 1
    kernel = _sizes(call["kernel_size"], count)
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": _sizes(call["stride"], count) if call["stride"] else kernel,
        "pads": _sizes(call["padding"], count) * 2,
        "ceil_mode": int(call["ceil_mode"]),
    }
    if is_max:
        attributes["dilations"] = _sizes(call["dilation"], count)
    else:
        attributes["count_include_pad"] = int(call["count_include_pad"])
    if call.get("divisor_override") is not None:
        raise ImportRefused("it divides by a number of its own")
    y = operation.onnx("MaxPool" if is_max else "AveragePool", x, **attributes)
    return [y, None] if call.name.endswith("with_indices") else y


def adaptive_pool(operation: ArchiveOperation) -> Any:
    """Pool all steps."""
    call = operation.call
    if any(size not in (1, None) for size in _sizes(call["output_size"], 1)):
        raise ImportRefused(f"it pools to {call['output_size']} steps by the length of the sequence: only 1 can be imported")
    x = operation.x
    operator = "ReduceMax" if "max" in call.name else "ReduceMean"
    y = operation.onnx(operator, x, axes=[*range(2, x.rank)], keepdims=1)
    return [y, None] if "max" in call.name else y


def reduction(operation: ArchiveOperation) -> Any:
    call = operation.call
    x = operation.x
    axes = call.get("dim")
    if call.name == "max" and call.overload == "other":
        return operation.onnx("Max", x, call["other"])
    axes = [*range(x.rank)] if axes is None or axes == [] else [axes] if isinstance(axes, int) else list(axes)
    operator = REDUCTIONS[call.name]
    y = operation.onnx(operator, x, axes=[axis % x.rank for axis in axes], keepdims=int(bool(call.get("keepdim"))))
    return [y, None] if call.name == "max" and call.overload == "dim" else y


def _sizes(value: Any, count: int) -> list[int]:
    sizes = list(value) if isinstance(value, Sequence) else [value]
    return sizes * count if len(sizes) == 1 else sizes


OPERATORS: dict[str, Callable[[ArchiveOperation], Any]] = {
    **dict.fromkeys(("conv1d", "conv2d", "convolution", "_convolution"), conv),
    **dict.fromkeys(
        ("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm"), batch_norm
    ),
    **dict.fromkeys(
        ("max_pool1d", "max_pool2d", "max_pool1d_with_indices", "max_pool2d_with_indices", "avg_pool1d", "avg_pool2d"), pool
    ),
    **dict.fromkeys(
        ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"), adaptive_pool
    ),
    **dict.fromkeys(REDUCTIONS, reduction),
    "layer_norm": layer_norm,
    "linear": lambda operation: operation.onnx("Gemm", *map(operation.call.get, ("input", "weight", "bias")), transB=1),
}
