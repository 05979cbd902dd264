"""Translates layers with weights, except recurrent layers, and pooling layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from service.importers.chain import operations
from service.importers.chain.functions import affine
from service.importers.chain.signal import Signal
from service.importers.chain.windows import Window, same_window
from service.importers.draft import Array, ImportRefused
from service.importers.keras.activations import activated
from service.importers.keras.call import KerasCall, KerasTensor

WINDOW_POOLS: dict[str, Literal["max", "mean"]] = {"MaxPooling1D": "max", "AveragePooling1D": "mean"}
GLOBAL_POOLS = {"GlobalMaxPooling1D": "max", "GlobalAveragePooling1D": "mean"}
EPSILON = 1e-7
"""The smallest deviation by which Normalization divides."""


def embedding(call: KerasCall) -> KerasTensor:
    call.refuse_options(quantization_config=None)
    [table] = _shaped(call, ("embeddings",), (2,))
    x = operations.embedding(call.signal, table, call.label, call.origins)
    if call.flag("mask_zero", False):
        call.reading.lengths = True
        call.reading.note(
            f"{call.label} has mask_zero: Keras skips every step of id 0, and the model skips none. Send sequences without padding"
        )
    return KerasTensor(x, call.flag("mask_zero", False) or call.tensor.is_masked)


def masking(call: KerasCall) -> KerasTensor:
    call.reading.lengths = True
    call.reading.note(
        f"{call.label}: Keras skips every step whose features are all {call.number('mask_value', 0.0):g}, and the model skips none. Send "
        "sequences without such steps"
    )
    return KerasTensor(call.signal, is_masked=True)


def dense(call: KerasCall) -> KerasTensor:
    call.refuse_options(quantization_config=None, lora_rank=None)
    kernel, *biases = _with_bias(call, ("kernel",), (2,))
    _check_inputs(call.signal, kernel, axis=0)
    bias = biases[0] if biases else np.zeros(kernel.shape[-1])
    x = operations.dense(call.signal, kernel, bias, call.label, call.origins)
    return call.result(activated(x, call.value("activation", None), call))


def conv(call: KerasCall) -> KerasTensor:
    kernel, *biases = _with_bias(call, ("kernel",), (3,))
    groups = call.integer("groups", 1)
    if groups < 1 or kernel.shape[2] % groups or call.signal.shape[-1] != kernel.shape[1] * groups:
        raise _unfit(call.signal, kernel, f" for {groups} groups")
    return _convolved(call, kernel, biases, groups)


def depthwise_conv(call: KerasCall) -> KerasTensor:
    kernel, *biases = _with_bias(call, ("kernel",), (3,))
    _check_inputs(call.signal, kernel, axis=1)
    return _convolved(call, _by_column(kernel), biases, kernel.shape[1])


def separable_conv(call: KerasCall) -> KerasTensor:
    by_column, across, *biases = _with_bias(call, ("depthwise_kernel", "pointwise_kernel"), (3, 3))
    _check_inputs(call.signal, by_column, axis=1)
    call.ignores_mask()
    x, filters = call.signal, _by_column(by_column)
    zeros = np.zeros(filters.shape[2])
    at, groups = x.rank - 1, by_column.shape[1]
    x = operations.conv(x, filters, zeros, call.label, call.origins, at=at, window=_window(call, len(filters)), groups=groups)
    _check_inputs(x, across, axis=1)
    bias = biases[0] if biases else np.zeros(across.shape[2])
    x = operations.conv(x, across, bias, call.label, call.origins, at=at, window=Window(1))
    return KerasTensor(activated(x, call.value("activation", None), call))


def pool_windows(call: KerasCall) -> KerasTensor:
    call.ignores_mask()
    x = _over_steps(call)
    width = call.integer("pool_size")
    window = _window(call, width, stride=width if call.value("strides", None) is None else call.integer("strides"))
    reduce = WINDOW_POOLS[call.layer.kind]
    if window == Window(x.shape[1], window.stride):
        return KerasTensor(operations.pool_steps(x, reduce, keep_axis=True))
    return KerasTensor(operations.pool_windows(x, reduce, call.label, window=window))


def pool_steps(call: KerasCall) -> KerasTensor:
    """A pool over all steps. A mean is one over the steps that the mask leaves; a maximum ignores the mask."""
    how = GLOBAL_POOLS[call.layer.kind]
    if how == "max":
        call.ignores_mask()
    return KerasTensor(operations.pool_steps(_over_steps(call), how, keep_axis=call.flag("keepdims", False)))


def batch_norm(call: KerasCall) -> KerasTensor:
    _check_last_axis(call)
    size = call.signal.shape[-1]
    gain, offset, mean, variance = _norm(call, ("gamma", "beta", "moving_mean", "moving_variance"), size)
    factor = gain / np.sqrt(variance + call.number("epsilon", 1e-3))
    return _scaled(call, factor, offset - mean * factor)


def layer_norm(call: KerasCall) -> KerasTensor:
    _check_last_axis(call)
    call.refuse_options(rms_scaling=False)
    gain, offset = _norm(call, ("gamma", "beta"), call.signal.shape[-1])
    epsilon = call.number("epsilon", 1e-3)
    return call.result(operations.layer_norm(call.signal, gain, offset, epsilon, call.label, call.origins))


def unit_norm(call: KerasCall) -> KerasTensor:
    _check_last_axis(call)
    return call.result(operations.normalize(call.signal, call.label, at=call.signal.rank - 1))


def rescaling(call: KerasCall) -> KerasTensor:
    factor, offset = call.number("scale"), call.number("offset", 0.0)
    return call.result(operations.apply(call.signal, affine(factor, offset), call.label))


def normalization(call: KerasCall) -> KerasTensor:
    """Normalization with the statistics of its adaption, (1, ..., columns)."""
    _check_last_axis(call)
    call.refuse_options(invert=False, mean=None, variance=None)
    mean, variance = (array.astype(np.float64).ravel() for array in call.weights("mean", "variance", unread=1))
    if mean.shape != (call.signal.shape[-1],) or variance.shape != mean.shape:
        raise ImportRefused(f"its tensors have the shapes {mean.shape} and {variance.shape}, which do not fit its input")
    factor = 1 / np.maximum(np.sqrt(variance), EPSILON)
    return _scaled(call, factor, -mean * factor)


def _scaled(call: KerasCall, factor: Array, offset: Array) -> KerasTensor:
    """Multiply each column by a factor and add an offset."""
    if not (np.isfinite(factor).all() and np.isfinite(offset).all()):
        raise ImportRefused("its tensors and its epsilon make numbers that are not finite: repair the checkpoint")
    return call.result(operations.apply(call.signal, affine(factor, offset), call.label, call.origins))


def _convolved(call: KerasCall, kernel: Array, biases: Sequence[Array], groups: int) -> KerasTensor:
    call.ignores_mask()
    x = _over_steps(call)
    bias = biases[0] if biases else np.zeros(kernel.shape[2])
    window = _window(call, len(kernel))
    x = operations.conv(x, kernel, bias, call.label, call.origins, at=2, window=window, groups=groups)
    return KerasTensor(activated(x, call.value("activation", None), call))


def _by_column(kernel: Array) -> Array:
    """Return the filters of groups of one column. kernel: (width, columns, filters of each column)."""
    return kernel.reshape(len(kernel), 1, -1)


def _window(call: KerasCall, width: int, *, stride: int | None = None) -> Window:
    stride = call.integer("strides", 1) if stride is None else stride
    dilation = call.integer("dilation_rate", 1)
    padding = call.value("padding", "valid")
    if min(width, stride, dilation) < 1:
        raise ImportRefused(f"its width {width}, strides {stride} or dilation_rate {dilation} is not positive")
    if padding == "same":
        return same_window(width, stride, dilation, "same_upper")
    if padding not in ("valid", "causal"):
        raise ImportRefused(f"its padding is {padding!r:.20}: use valid, same or causal")
    return Window(width, stride, dilation, ((width - 1) * dilation if padding == "causal" else 0, 0))


def _over_steps(call: KerasCall) -> Signal:
    call.refuse_options(data_format="channels_last")
    return call.over_steps()


def _with_bias(call: KerasCall, names: tuple[str, ...], ranks: Sequence[int]) -> list[Array]:
    """Return the weights of a layer, and its bias if it has one."""
    call.refuse_options(data_format="channels_last")
    has_bias = call.flag("use_bias", True)
    arrays = _shaped(call, (*names, "bias") if has_bias else names, (*ranks, 1) if has_bias else ranks)
    if has_bias and arrays[-1].shape != arrays[-2].shape[-1:] and call.layer.kind != "DepthwiseConv1D":
        raise ImportRefused(f"its bias has the shape {arrays[-1].shape}, and its weights {arrays[-2].shape}")
    return arrays


def _shaped(call: KerasCall, names: Sequence[str], ranks: Sequence[int]) -> list[Array]:
    arrays = call.weights(*names)
    for name, array, rank in zip(names, arrays, ranks, strict=True):
        if array.ndim != rank:
            raise ImportRefused(f"its tensor {name} has the shape {array.shape}, and needs {rank} axes")
    return arrays


def _norm(call: KerasCall, names: Sequence[str], size: int) -> list[Array]:
    """Return the tensors of a norm in float64: a gain of 1 and an offset of 0 where the layer has none."""
    absent = {"gamma": not call.flag("scale", True), "beta": not call.flag("center", True)}
    kept = [name for name in names if not absent.get(name, False)]
    arrays = dict(zip(kept, _shaped(call, kept, [1] * len(kept)), strict=True))
    wrong = {name: array.shape for name, array in arrays.items() if array.shape != (size,)}
    if wrong:
        raise ImportRefused(f"its tensors have the shapes {wrong}, and its input has {size} columns")
    defaults = {"gamma": np.ones(size), "beta": np.zeros(size)}
    return [np.asarray(arrays.get(name, defaults.get(name)), np.float64) for name in names]


def _check_last_axis(call: KerasCall) -> None:
    axis = call.value("axis", -1)
    if axis not in (-1, call.signal.rank - 1, [-1], [call.signal.rank - 1]):
        raise ImportRefused(f"its axis is {axis!r:.20}: only the last axis can be normalised")


def _check_inputs(x: Signal, kernel: Array, *, axis: int) -> None:
    if not x.rank or x.shape[-1] != kernel.shape[axis]:
        raise _unfit(x, kernel)


def _unfit(x: Signal, kernel: Array, groups: str = "") -> ImportRefused:
    return ImportRefused(f"its weights have the shape {kernel.shape}{groups}, and its input has {x.shape[-1]} columns")


LAYERS: dict[str, Callable[[KerasCall], KerasTensor]] = {
    **dict.fromkeys(GLOBAL_POOLS, pool_steps),
    **dict.fromkeys(WINDOW_POOLS, pool_windows),
    "BatchNormalization": batch_norm,
    "Conv1D": conv,
    "Dense": dense,
    "DepthwiseConv1D": depthwise_conv,
    "Embedding": embedding,
    "LayerNormalization": layer_norm,
    "Masking": masking,
    "Normalization": normalization,
    "Rescaling": rescaling,
    "SeparableConv1D": separable_conv,
    "UnitNormalization": unit_norm,
}
