"""Translates operators with weights and pooling operators: products, convolutions, norms, pools over windows or all steps, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from service.importers.chain import combining, operations
from service.importers.chain.functions import affine
from service.importers.chain.signal import Role, Signal
from service.importers.chain.values import Constant, Value
from service.importers.chain.windows import Window, same_window
from service.importers.draft import ImportRefused
from service.importers.onnx.operation import Axes, Operation, checked_axis

REDUCTIONS = {"ReduceMax": "max", "ReduceMean": "mean", "ReduceSum": "sum"}
GLOBAL_POOLS = {"GlobalMaxPool": "max", "GlobalAveragePool": "mean"}
POOLS: dict[str, Literal["max", "mean"]] = {"MaxPool": "max", "AveragePool": "mean"}


def gemm(operation: Operation) -> Value:
    x = operation.signal
    if operation.attributes.get("transA", 0):
        x = x.transpose([1, 0])
    weight = operation.weights(1, "B")
    weight = weight.T if operation.attributes.get("transB", 0) else weight
    _check_product(x, weight.shape)
    bias = np.broadcast_to(operation.optional_weights(2, "C", 1), (1, weight.shape[1]))[0]
    alpha, beta = (float(operation.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    return operations.dense(x, weight * alpha, bias * beta, operation.label, operation.origins)


def matmul(operation: Operation) -> Value:
    if isinstance(operation.inputs[0], Constant):
        raise ImportRefused("it multiplies a matrix by the tensor: exchange them, with the tensor transposed")
    x, other = operation.signal, operation.inputs[1]
    if isinstance(other, Signal):
        return operations.product_over_steps(x, other, operation.label)
    weight = operation.weights(1, "B")
    while weight.ndim > 2 and weight.shape[0] == 1:
        weight = weight[0]
    matrix = weight[:, None] if weight.ndim == 1 else weight
    _check_product(x, matrix.shape)
    product = operations.dense(x, matrix, np.zeros(matrix.shape[1]), operation.label, operation.origins)
    return product.without_axes([x.rank - 1]) if weight.ndim == 1 else product


def conv(operation: Operation) -> Value:
    x, kernel = operation.signal, operation.weights(1, "W")
    if kernel.ndim != x.rank or x.rank < 3:
        raise ImportRefused(f"its weights have the shape {kernel.shape}, and its input has {x.rank} axes")
    if list(operation.attributes.get("kernel_shape") or kernel.shape[2:]) != list(kernel.shape[2:]):
        raise ImportRefused(
            f"its kernel_shape is {operation.attributes['kernel_shape']}, and its weights have {kernel.shape[2:]}"
        )
    bias = operation.optional_weights(2, "B", kernel.shape[0])
    groups = operation.attributes.get("group", 1)
    if groups < 1:
        raise ImportRefused(f"its group is {groups}")
    steps = x.steps_axis
    window = _window(operation, x, kernel.shape[2:])
    at = _columns_axis(x, kernel.shape)
    inputs = kernel.shape[at] if at > 1 else kernel.shape[1]
    if x.shape[at] != inputs * groups or kernel.shape[0] % groups or bias.shape != kernel.shape[:1]:
        raise ImportRefused(
            f"its weights have the shape {kernel.shape} for {groups} groups, and its input has {x.shape[at]} columns"
        )
    filters = np.moveaxis(kernel, (steps, at if at > 1 else 1, 0), (0, 1, 2)).reshape(window.width, inputs, -1)
    convolved = operations.conv(x, filters, bias, operation.label, operation.origins, at=at, window=window, groups=groups)
    if at == 1:
        return convolved
    order = list(range(x.rank))
    order[1], order[at] = at, 1
    return convolved.transpose(order)


def pool(operation: Operation) -> Value:
    x = operation.signal
    kernel = operation.attributes.get("kernel_shape") or []
    if len(kernel) != x.rank - 2:
        raise ImportRefused(f"its kernel_shape is {kernel}, and its input has {x.rank} axes")
    steps = x.steps_axis
    window = _window(operation, x, kernel)
    if any(x.axes[index].size > 1 and size > 1 for index, size in enumerate(kernel, start=2) if index != steps):
        raise ImportRefused("it pools columns")
    reduce = POOLS[operation.node.op_type]
    adds_windows = bool(operation.attributes.get("ceil_mode", 0)) and window.stride > 1
    covers_all = not window.by_length and window.pads == (0, 0) and window.stride == window.reach and not adds_windows
    if covers_all and not operation.reading.fixed:
        operation.reading.whole_pools.append(operation.reading.steps - x.shape[steps] + window.reach)
    if window == Window(x.shape[steps], window.stride):
        return operations.pool_steps(x, reduce, keep_axis=True)
    if adds_windows:
        raise ImportRefused("its ceil_mode is 1, which adds a window that is not full: set it to 0, or stride to 1")
    count_padding = reduce == "mean" and bool(operation.attributes.get("count_include_pad", 0)) and window.pads != (0, 0)
    return operations.pool_windows(x, reduce, operation.label, window=window, count_padding=count_padding)


def global_pool(operation: Operation) -> Value:
    x = operation.signal
    return _reduced(operation, x, list(range(2, x.rank)), GLOBAL_POOLS[operation.node.op_type], keep_axes=True)


def reduce(operation: Operation) -> Value:
    x = operation.signal
    axes = operation.axes(x.rank)
    if axes is None:
        if operation.attributes.get("noop_with_empty_axes", 0):
            return x
        axes = list(range(x.rank))
    return _reduced(
        operation, x, axes, REDUCTIONS[operation.node.op_type], keep_axes=bool(operation.attributes.get("keepdims", 1))
    )


def batch_norm(operation: Operation) -> Value:
    x = operation.signal
    operation.refuse_options(training_mode=0, spatial=1)
    scale, offset, mean, variance = (
        operation.weights(index, name).astype(np.float64) for index, name in enumerate(("scale", "B", "mean", "var"), start=1)
    )
    factor = scale / np.sqrt(variance + operation.attributes.get("epsilon", 1e-5))
    if x.rank < 2 or not x.axes[1].is_columns or factor.shape != (x.shape[1],):
        raise ImportRefused(f"its input has the axes {', '.join(x.roles)}, and a batch norm works on columns along axis 1")
    if x.columns.size != factor.size:
        raise ImportRefused(f"it works on one of several axes of columns: the shape of its input is {x.shape}")
    return operations.apply(x, affine(factor, offset - mean * factor), operation.label, operation.origins)


def layer_norm(operation: Operation) -> Value:
    x = operation.signal
    if checked_axis(operation.attributes.get("axis", -1), x.rank) != x.rank - 1:
        raise ImportRefused("it normalises several axes: only the last axis can be normalised")
    gain = operation.weights(1, "Scale")
    offset = operation.optional_weights(2, "B", len(gain))
    if gain.shape != x.shape[-1:] or offset.shape != gain.shape:
        raise ImportRefused(f"its scale has the shape {gain.shape}, and its input has {x.shape[-1]} columns")
    epsilon = float(operation.attributes.get("epsilon", 1e-5))
    return operations.layer_norm(x, gain, offset, epsilon, operation.label, operation.origins)


def softmax(operation: Operation) -> Value:
    x = operation.signal
    old = operation.reading.opset < 13
    at = checked_axis(operation.attributes.get("axis", 1 if old else -1), x.rank)
    if old and any(not one.is_unit for one in x.axes[at + 1 :]):
        raise ImportRefused(f"before opset 13 it works on all axes from {at} at once: export the model with opset 13 or newer")
    return operations.softmax(x, operation.label, at=at, log=operation.node.op_type == "LogSoftmax")


def normalize(operation: Operation) -> Value:
    """LpNormalization, which scales vectors to length 1."""
    operation.refuse_options(p=2)
    x = operation.signal
    return operations.normalize(x, operation.label, at=checked_axis(operation.attributes.get("axis", -1), x.rank))


def _check_product(x: Signal, shape: Sequence[int]) -> None:
    if len(shape) != 2 or x.shape[-1] != shape[0]:
        raise ImportRefused(f"its weights have the shape {tuple(shape)}, and its input has {x.shape[-1]} columns")


def _columns_axis(x: Signal, kernel: Sequence[int]) -> int:
    """Return the axis of columns of a convolution: axis 1, or the last axis of an image with one channel that the kernel covers."""
    wide = [index for index in range(2, x.rank) if x.axes[index].is_columns and x.shape[index] > 1]
    if not wide:
        return 1
    if len(wide) > 1 or x.shape[1] != 1 or kernel[wide[0]] != x.shape[wide[0]]:
        raise ImportRefused(f"its kernel has the shape {tuple(kernel)} and covers a part of the columns of {x.shape}")
    return wide[0]


def _window(operation: Operation, x: Signal, kernel: Sequence[int]) -> Window:
    """Return the window over steps; the other axes of a kernel have one position."""
    count, steps = len(kernel), x.steps_axis - 2
    if steps < 0:
        raise ImportRefused(f"its input has the axes {', '.join(x.roles)}, and its window moves along axis 2 or a later one")
    strides, dilations = (operation.attributes.get(name) or [1] * count for name in ("strides", "dilations"))
    pads = operation.attributes.get("pads") or [0] * 2 * count
    if (
        len(strides) != count
        or len(dilations) != count
        or len(pads) != 2 * count
        or min(pads) < 0
        or min([*strides, *dilations, *kernel]) < 1
    ):
        raise ImportRefused(f"its strides {strides}, dilations {dilations} or pads {pads} do not fit its kernel {list(kernel)}")
    auto = operation.attributes.get("auto_pad", "NOTSET")
    for index in range(count):
        padded = pads[index] or pads[index + count] or (auto.startswith("SAME") and kernel[index] > 1)
        if index != steps and (padded or (kernel[index] > 1 and x.shape[index + 2] != kernel[index])):
            raise ImportRefused("its kernel moves along another axis than the steps")
    size, stride, dilation = int(kernel[steps]), int(strides[steps]), int(dilations[steps])
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return same_window(size, stride, dilation, "same_upper" if auto == "SAME_UPPER" else "same_lower")
    return Window(size, stride, dilation, (0, 0) if auto == "VALID" else (int(pads[steps]), int(pads[steps + count])))


def _reduced(operation: Operation, x: Signal, axes: Axes, how: str, *, keep_axes: bool) -> Signal:
    """Reduce the steps, and the two directions of a layer. Axes of one entry only disappear."""
    for index in sorted(set(axes), reverse=True):
        if x.is_on(index, Role.STEPS):
            x = operations.pool_steps(x, how, keep_axis=True)
        elif not x.axes[index].is_columns:
            raise ImportRefused(f"it reduces the axis of {x.axes[index]}")
        elif x.shape[index] > 1:
            x = _reduced_columns(operation, x, index, how)
    return x if keep_axes else x.without_axes(axes)


def _reduced_columns(operation: Operation, x: Signal, index: int, how: str) -> Signal:
    """Reduce an axis with both directions of a layer."""
    if x.shape[index] != 2 or how == "max":
        raise ImportRefused(f"it reduces {x.shape[index]} columns")
    first, second = (x.take(np.array([one]), index) for one in (0, 1))
    if how == "mean":
        return operations.mean([first, second], operation.label)
    return combining.combine(first, second, "add", operation.label)


OPERATORS: dict[str, Callable[[Operation], Value]] = {
    **dict.fromkeys(GLOBAL_POOLS, global_pool),
    **dict.fromkeys(POOLS, pool),
    **dict.fromkeys(REDUCTIONS, reduce),
    "BatchNormalization": batch_norm,
    "Conv": conv,
    "Gemm": gemm,
    "LayerNormalization": layer_norm,
    "LogSoftmax": softmax,
    "LpNormalization": normalize,
    "MatMul": matmul,
    "Softmax": softmax,
}
