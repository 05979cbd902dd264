"""Convolutions and pools of ONNX, and the networks that consist of them: text CNNs and TCNs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto

from tests.importers.onnx.case import Case
from tests.importers.onnx.graphs import FEATURES, VOCABULARY, Net

FILTERS = 4
CHANNELS_FIRST = (0, 2, 1)
LONG = (9, 5, 12, 7)
"""Lengths with several windows each."""


def channels(net: Net, x: str = "x") -> str:
    """Move the columns before the steps, where a convolution has them."""
    return net.add("Transpose", x, perm=[0, 2, 1])


def conv(
    net: Net, x: str, inputs: int = FEATURES, width: int = 3, filters: int = FILTERS, *, bias: bool = True, **attributes: Any
) -> str:
    names = [x, net.weight(filters, inputs // attributes.get("group", 1), width)] + ([net.weight(filters)] if bias else [])
    return net.add("Conv", *names, **attributes)


def one_conv(inputs: int = FEATURES, **options: Any) -> ModelProto:
    """Return a graph of one convolution that answers every step."""
    net = Net(("batch", FEATURES, "steps"))
    x = "x" if inputs == FEATURES else net.add("Conv", "x", net.weight(inputs, FEATURES, 1))
    return net.model(channels(net, conv(net, x, inputs, **options)))


def padded_conv(pads: Sequence[int], **attributes: Any) -> ModelProto:
    """Return a graph that pads with a separate node."""
    net = Net()
    padded = net.add("Pad", channels(net), net.constant([0, 0, pads[0], 0, 0, pads[1]]), **attributes)
    return net.model(channels(net, net.add("Relu", conv(net, padded))))


def chomped(first: int, last: int) -> ModelProto:
    """Return a graph that cuts the ends off a convolution that was padded on both sides."""
    net = Net()
    y = conv(net, channels(net), pads=[2, 2])
    cut = net.add("Slice", y, net.constant([first]), net.constant([-last if last else 1 << 40]), net.constant([2]))
    return net.model(channels(net, cut))


def image_conv(height: int = 3, covered: int = FEATURES, *, transposed: bool = False, **attributes: Any) -> ModelProto:
    """Return a graph with a convolution of an image with one channel. The rows of the image are the steps, or its columns."""
    net = Net()
    image = net.add("Unsqueeze", channels(net) if transposed else "x", net.constant([1]))
    kernel = (covered, height) if transposed else (height, covered)
    y = net.add("Conv", image, net.weight(FILTERS, 1, *kernel), net.weight(FILTERS), **attributes)
    removed = net.add("Squeeze", y, net.constant([2 if transposed else 3]))
    return net.model(net.add("ReduceMax", net.add("Relu", removed), axes=[2], keepdims=0))


def with_batch_norm(*, before_activation: bool = True) -> ModelProto:
    net = Net()
    y = conv(net, channels(net), pads=[1, 1])
    y = y if before_activation else net.add("Relu", y)
    statistics = [net.weight(FILTERS), net.weight(FILTERS), net.weight(FILTERS), net.positive(FILTERS)]
    y = net.add("BatchNormalization", y, *statistics, epsilon=0.01)
    return net.model(channels(net, net.add("Relu", y) if before_activation else y))


def gated(*, with_tanh: bool = False, by_slices: bool = False) -> ModelProto:
    """Return a graph with half of the maps times the logistic function of the other half."""
    net = Net()
    y = conv(net, channels(net), filters=2 * FILTERS, pads=[2, 0])
    if by_slices:
        halves = [
            net.add("Slice", y, net.constant([at]), net.constant([at + FILTERS]), net.constant([1])) for at in (0, FILTERS)
        ]
    else:
        first = net.add("Split", y, net.constant([FILTERS, FILTERS]), outputs=2, axis=1)
        halves = [first, f"{first}.1"]
    value = net.add("Tanh", halves[0]) if with_tanh else halves[0]
    return net.model(channels(net, net.add("Mul", value, net.add("Sigmoid", halves[1]))))


def parallel(*windows: tuple[int, Sequence[int]], pooled: bool = False, activation: str = "Relu") -> ModelProto:
    """Return a graph with several convolutions over the same steps, each with a width and pads."""
    net = Net()
    x = channels(net)
    branches = [net.add(activation, conv(net, x, width=width, pads=list(pads))) for width, pads in windows]
    if pooled:
        branches = [net.add("ReduceMax", branch, axes=[2], keepdims=0) for branch in branches]
    joined = net.add("Concat", *branches, axis=1)
    return net.model(net.dense(joined, FILTERS * len(windows), 2) if pooled else channels(net, joined))


def text_cnn(*, pool: str = "GlobalMaxPool", before: bool = True) -> ModelProto:
    """Return a text CNN over token ids. before: whether the activation comes before the pool."""
    net = Net(ids=True)
    x = channels(net, net.add("Gather", net.weight(VOCABULARY, 5), "x", axis=0))
    branches = []
    for width, filters in ((2, 3), (3, 3), (4, 2)):
        y = conv(net, x, 5, width, filters)
        y = net.add(pool, net.add("Relu", y)) if before else net.add("Relu", net.add(pool, y))
        branches.append(net.add("Flatten", y))
    return net.model(net.add("Softmax", net.dense(net.add("Concat", *branches, axis=1), 8, 3)))


def pool(operator: str, **attributes: Any) -> ModelProto:
    net = Net()
    return net.model(channels(net, net.add(operator, channels(net), **attributes)))


def whole_pool(operator: str, **attributes: Any) -> ModelProto:
    """Return a graph that pools all steps."""
    net = Net()
    x = net.dense("x", FEATURES, 5)
    pooled = net.add(operator, x if attributes else channels(net, x), **attributes)
    return net.model(net.dense(net.add("Flatten", pooled), 5, 2))


def joined_pools(*operators: str) -> ModelProto:
    net = Net()
    x = net.dense("x", FEATURES, 5)
    pools = [net.add(operator, x, axes=[1], keepdims=0) for operator in operators]
    return net.model(net.dense(net.add("Concat", *pools, axis=1), 5 * len(pools), 2))


def tcn(
    dilations: Sequence[int] = (1, 2, 4), *, norm: bool = False, chomp: bool = True, activation: str = "Relu", width: int = 3
) -> ModelProto:
    """Return a TCN with a projection in its first level. norm: with the weight norm computed in the graph."""
    net = Net()
    x, inputs = channels(net), FEATURES
    for dilation in dilations:
        around = (width - 1) * dilation
        y, columns = x, inputs
        for _ in range(2):
            filters = _normalised(net, FILTERS, columns, width) if norm else net.weight(FILTERS, columns, width)
            pads = [around, around if chomp else 0]
            y = net.add("Conv", y, filters, net.weight(FILTERS), pads=pads, dilations=[dilation])
            if chomp:
                y = net.add("Slice", y, net.constant([0]), net.constant([-around]), net.constant([2]))
            y, columns = net.add("Relu", y), FILTERS
        residual = conv(net, x, inputs, 1) if inputs != FILTERS else x
        x, inputs = net.add(activation, net.add("Add", y, residual)), FILTERS
    last = net.add("Gather", x, net.constant(np.array(-1)), axis=2)
    return net.model(net.dense(last, FILTERS, 2))


def _normalised(net: Net, *shape: int) -> str:
    """Compute filters from their directions and magnitudes, as exporters of torch write it."""
    direction, magnitude = net.weight(*shape), net.positive(shape[0], 1, 1)
    return net.add("Mul", net.add("Div", direction, net.add("ReduceL2", direction, axes=[1, 2], keepdims=1)), magnitude)


def fixed_pool() -> ModelProto:
    """Return a graph with a pooling window over all 8 steps of its input."""
    net = Net(("batch", 8, FEATURES))
    y = net.add("MaxPool", net.add("Relu", conv(net, channels(net))), kernel_shape=[6])
    return net.model(net.dense(net.add("Flatten", y), FILTERS, 2))


def _conv(option: str, refused: str = "", **options: Any) -> Case:
    return Case("Conv", option, partial(one_conv, **options), refused, axes=CHANNELS_FIRST, lengths=LONG)


def _pool(operator: str, option: str, refused: str = "", **attributes: Any) -> Case:
    return Case(operator, option, partial(pool, operator, **attributes), refused, lengths=LONG)


CASES = [
    _conv("no padding"),
    _conv("without bias", bias=False),
    _conv("width 1", width=1),
    _conv("pads on both sides", pads=[1, 1]),
    _conv("pads on the left (causal)", pads=[2, 0]),
    _conv("pads on the right", pads=[0, 2]),
    _conv("uneven pads", pads=[3, 1]),
    _conv("more pads than the width", pads=[5, 4]),
    _conv("strides", strides=[2], pads=[1, 1]),
    _conv("strides of more than the width", strides=[4], pads=[1, 0]),
    _conv("dilations", dilations=[2], pads=[2, 2]),
    _conv("strides and dilations", strides=[2], dilations=[2], pads=[2, 1]),
    _conv("group 3", inputs=6, group=3, filters=6),
    _conv("group as many as columns (depthwise)", group=3, filters=3, pads=[1, 1]),
    _conv("depthwise with two filters for each column", group=3, filters=6, pads=[1, 1]),
    _conv('auto_pad "SAME_UPPER", even width', auto_pad="SAME_UPPER", width=4),
    _conv('auto_pad "SAME_LOWER", even width', auto_pad="SAME_LOWER", width=4),
    _conv('auto_pad "SAME_UPPER" with strides', auto_pad="SAME_UPPER", width=4, strides=[2]),
    _conv('auto_pad "SAME_LOWER" with strides', auto_pad="SAME_LOWER", width=4, strides=[3]),
    _conv('auto_pad "VALID"', auto_pad="VALID"),
    _conv("a kernel that is larger than its weights", "kernel_shape", kernel_shape=[5]),
    _conv("negative pads", "do not fit its kernel", pads=[-1, 0]),
    Case("Conv", "over an image with one channel, whose rows are the steps", image_conv, lengths=LONG),
    Case("Conv", "over an image whose columns are the steps", partial(image_conv, transposed=True), lengths=LONG),
    Case("Conv", "over an image, with pads along the steps", partial(image_conv, pads=[2, 0, 2, 0]), lengths=LONG),
    Case(
        "Conv", "over an image, with pads along the columns", partial(image_conv, pads=[0, 1, 0, 1]), "moves along another axis"
    ),
    Case(
        "Conv", "over an image, with a kernel narrower than the columns", partial(image_conv, covered=2), "along another axis"
    ),
    Case("Pad, Conv", "pads on the left", partial(padded_conv, [2, 0])),
    Case("Pad, Conv", "uneven pads", partial(padded_conv, [1, 3])),
    Case("Pad, Conv", "fewer steps (negative pads)", partial(padded_conv, [-1, 0]), "leaves out steps"),
    Case("Pad, Conv", 'mode "reflect"', partial(padded_conv, [1, 1], mode="reflect"), "pads with other numbers than zero"),
    Case("Conv, Slice", "the right ends are cut (causal)", partial(chomped, 0, 2)),
    Case("Conv, Slice", "the left ends are cut", partial(chomped, 2, 0)),
    Case("Conv, Slice", "both ends are cut", partial(chomped, 1, 1)),
    Case("Conv, Slice", "more than the pads is cut", partial(chomped, 0, 3), "only the padding of a convolution"),
    Case("Conv, BatchNormalization", "before the activation", with_batch_norm),
    Case("Conv, BatchNormalization", "after the activation", partial(with_batch_norm, before_activation=False)),
    Case("Conv, Sigmoid, Mul", "gated linear unit", gated),
    Case("Conv, Sigmoid, Mul", "gated linear unit of slices", partial(gated, by_slices=True)),
    Case("Conv, Tanh, Sigmoid, Mul", "gated tanh", partial(gated, with_tanh=True)),
    Case("Conv, Concat", "several convolutions of one width", partial(parallel, (3, (1, 1)), (3, (1, 1)))),
    Case("Conv, Concat", "several widths, as many steps", partial(parallel, (3, (1, 1)), (1, (0, 0)), (5, (2, 2)))),
    Case(
        "Conv, Concat", "several widths with other activations", partial(parallel, (3, (1, 1)), (5, (2, 2)), activation="Tanh")
    ),
    Case("Conv, Concat", "windows of other positions", partial(parallel, (3, (2, 0)), (2, (0, 1)))),
    Case("Conv, Concat", "another number of steps", partial(parallel, (3, (0, 0)), (2, (0, 0))), "joins tensors"),
    Case(
        "Conv, ReduceMax, Concat",
        "text CNN over features",
        partial(parallel, (2, (0, 0)), (3, (0, 0)), pooled=True),
        lengths=LONG,
    ),
    Case("Conv, ReduceMax, Concat", "text CNN with pads", partial(parallel, (2, (3, 3)), (4, (3, 3)), pooled=True)),
    Case(
        *("Conv, ReduceMax, Concat", "text CNN with other activations"),
        partial(parallel, (2, (0, 0)), (3, (0, 0)), pooled=True, activation="Tanh"),
        "A text_cnn has convolutions",
    ),
    Case(
        *("Conv, ReduceMax, Concat", "text CNN whose widths have different pads"),
        partial(parallel, (2, (1, 1)), (4, (3, 3)), pooled=True),
        "each with as many padding steps",
    ),
    Case("Gather, Conv, GlobalMaxPool", "text CNN with different numbers of filters", text_cnn, lengths=LONG),
    Case("Gather, Conv, GlobalMaxPool", "activation after the pool", partial(text_cnn, before=False), lengths=LONG),
    Case(
        "Gather, Conv, GlobalAveragePool", "text CNN with means", partial(text_cnn, pool="GlobalAveragePool"), "joins the pools"
    ),
    Case("MaxPool", "over all steps of a graph of fixed length", fixed_pool, lengths=[8]),
    *(
        case
        for name in ("MaxPool", "AveragePool")
        for case in (
            _pool(name, "window 2, strides 2", kernel_shape=[2], strides=[2]),
            _pool(name, "window 3, strides 1", kernel_shape=[3]),
            _pool(name, "pads", kernel_shape=[3], pads=[1, 1]),
            _pool(name, "uneven pads and strides", kernel_shape=[3], pads=[0, 2], strides=[2]),
            _pool(name, 'auto_pad "SAME_UPPER" with strides', kernel_shape=[3], strides=[2], auto_pad="SAME_UPPER"),
            _pool(name, 'auto_pad "SAME_LOWER" with strides', kernel_shape=[4], strides=[3], auto_pad="SAME_LOWER"),
            _pool(name, "ceil_mode with strides", "ceil_mode is 1", kernel_shape=[2], strides=[2], ceil_mode=1),
        )
    ),
    _pool("AveragePool", "count_include_pad", kernel_shape=[3], pads=[1, 1], count_include_pad=1),
    _pool("AveragePool", "count_include_pad without pads", kernel_shape=[3], count_include_pad=1),
    _pool("MaxPool", "storage_order", kernel_shape=[2], strides=[2], storage_order=1),
    _pool("LpPool", "any window", "cannot be imported", kernel_shape=[2]),
    Case("GlobalMaxPool", "over all steps", partial(whole_pool, "GlobalMaxPool")),
    Case("GlobalAveragePool", "over all steps", partial(whole_pool, "GlobalAveragePool")),
    *(Case(name, "over all steps", partial(whole_pool, name, axes=[1], keepdims=0)) for name in ("ReduceMax", "ReduceMean")),
    *(Case(name, "keepdims 1", partial(whole_pool, name, axes=[1])) for name in ("ReduceMax", "ReduceMean")),
    Case("ReduceMean", "negative axis", partial(whole_pool, "ReduceMean", axes=[-2], keepdims=0)),
    Case("ReduceMax", "over the columns", partial(whole_pool, "ReduceMax", axes=[2], keepdims=0), "it reduces 5 columns"),
    Case("ReduceMean", "over the batch", partial(whole_pool, "ReduceMean", axes=[0], keepdims=0), "reduces the axis of batch"),
    *(
        Case(name, "over all steps", partial(whole_pool, name, axes=[1], keepdims=0), "cannot be imported")
        for name in ("ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare")
    ),
    Case("ReduceMean, ReduceMax, Concat", "several pools", partial(joined_pools, "ReduceMean", "ReduceMax")),
    Case("Conv, Relu, Add", "TCN with causal pads", partial(tcn, chomp=False)),
    Case("Conv, Relu, Add", "TCN whose ends are cut (Chomp1d)", tcn),
    Case("Conv, Relu, Add", "TCN with the weight norm in the graph", partial(tcn, norm=True)),
    Case("Conv, Relu, Add", "TCN of one level", partial(tcn, [1])),
    Case("Conv, Relu, Add", "TCN of width 2", partial(tcn, width=2)),
    Case("Conv, Relu, Add", "TCN with dilations 1, 3", partial(tcn, [1, 3]), "dilated by 1, 2, 4"),
    Case("Conv, Relu, Add", "TCN with another activation after the sum", partial(tcn, activation="Tanh"), "adds two tensors"),
]
