"""Convolutions and pools of ONNX, and the networks that consist of them: text CNNs and TCNs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from onnx import ModelProto

from tests.importers.onnx.graphs import CHANNELS_FIRST, FEATURES, VOCABULARY, Case, Net, Operator, channels, dense, graph

FILTERS = 4
LONG = (9, 5, 12, 7)
"""Lengths with several windows each."""
MAXIMUM: Operator = ("ReduceMax", {"axes": [2], "keepdims": 0})


def conv(inputs: int = FEATURES, width: int = 3, filters: int = FILTERS, *, bias: bool = True, **attributes: Any) -> Operator:
    def build(net: Net, x: str) -> str:
        names = [x, net.weight(filters, inputs // attributes.get("group", 1), width)] + ([net.weight(filters)] if bias else [])
        return net.add("Conv", *names, **attributes)

    return build


def around(*operators: Operator, **options: Any) -> Any:
    """Return a graph of a chain over channels that answers every step."""
    return graph(channels, *operators, channels, **options)


def image(height: int = 3, covered: int = FEATURES, *, transposed: bool = False, **attributes: Any) -> Any:
    """Return a graph with a convolution of an image with one channel. The rows of the image are the steps, or its columns."""
    kernel = (covered, height) if transposed else (height, covered)

    def convolve(net: Net, x: str) -> str:
        return net.add("Conv", x, net.weight(FILTERS, 1, *kernel), net.weight(FILTERS), **attributes)

    start: list[Operator] = [channels] if transposed else []
    return graph(*start, ("Unsqueeze", [1]), convolve, ("Squeeze", [2 if transposed else 3]), ("Relu",), MAXIMUM)


def batch_norm(net: Net, x: str) -> str:
    statistics = [net.weight(FILTERS), net.weight(FILTERS), net.weight(FILTERS), net.positive(FILTERS)]
    return net.add("BatchNormalization", x, *statistics, epsilon=0.01)


def gate(*, with_tanh: bool = False, by_slices: bool = False) -> Operator:
    """Return half of the maps times the logistic function of the other half."""

    def build(net: Net, y: str) -> str:
        if by_slices:
            halves = [net.chain(y, ("Slice", [at], [at + FILTERS], [1])) for at in (0, FILTERS)]
        else:
            first = net.add("Split", y, net.constant([FILTERS, FILTERS]), outputs=2, axis=1)
            halves = [first, f"{first}.1"]
        value = net.add("Tanh", halves[0]) if with_tanh else halves[0]
        return net.add("Mul", value, net.add("Sigmoid", halves[1]))

    return build


def parallel(*windows: tuple[int, Sequence[int]], pool: str = "") -> Any:
    """Return a graph with convolutions over the same steps, each with a width and pads. pool: the activation before a maximum over time."""
    operators: list[Operator] = [(pool,), MAXIMUM] if pool else [("Relu",)]

    def build(net: Net, x: str) -> str:
        branches = (net.chain(x, conv(width=width, pads=list(pads)), *operators) for width, pads in windows)
        return net.add("Concat", *branches, axis=1)

    return graph(channels, build, dense(FILTERS * len(windows), 2)) if pool else around(build)


def text_cnn(*, pool: str = "GlobalMaxPool", before: bool = True) -> ModelProto:
    """Return a text CNN over token ids. before: whether the activation comes before the pool."""
    net = Net(ids=True)
    x = channels(net, net.add("Gather", net.weight(VOCABULARY, 5), "x", axis=0))
    middle = [("Relu",), (pool,)] if before else [(pool,), ("Relu",)]
    sizes = (2, 3), (3, 3), (4, 2)
    branches = [net.chain(x, conv(5, width, filters), *middle, ("Flatten",)) for width, filters in sizes]
    return net.model(net.chain(net.add("Concat", *branches, axis=1), dense(8, 3), ("Softmax",)))


def whole_pool(operator: str, **attributes: Any) -> Any:
    """Return a graph that pools all steps."""
    start: list[Operator] = [] if attributes else [channels]
    return graph(dense(FEATURES, 5), *start, (operator, attributes), ("Flatten",), dense(5, 2))


def joined_pools(net: Net, x: str) -> str:
    return net.add("Concat", *(net.add(name, x, axes=[1], keepdims=0) for name in ("ReduceMean", "ReduceMax")), axis=1)


def _case(name: str, build: Any, refused: str = "", *, lengths: Sequence[int] = LONG) -> Case:
    return Case(name, build, refused, lengths=lengths)


def _conv(option: str, refused: str = "", *, inputs: int = FEATURES, **options: Any) -> Case:
    widened: list[Operator] = [] if inputs == FEATURES else [conv(FEATURES, 1, inputs, bias=False)]
    build = graph(*widened, conv(inputs, **options), channels, shape=("batch", FEATURES, "steps"))
    return Case(f"Conv: {option}", build, refused, axes=CHANNELS_FIRST, lengths=LONG)


def _padded(option: str, before: int, after: int, refused: str = "", **attributes: Any) -> Case:
    return _case(f"Pad: {option}", around(("Pad", [0, 0, before, 0, 0, after], attributes), conv(), ("Relu",)), refused)


def _cut(option: str, first: int, last: int, refused: str = "") -> Case:
    """Return the case of a convolution that was padded on both sides, whose ends are cut."""
    return _case(f"Conv, Slice: {option}", around(conv(pads=[2, 2]), ("Slice", [first], [-last], [2])), refused)


def _pool(option: str, *kinds: str, refused: str = "", **attributes: Any) -> list[Case]:
    return [_case(f"{kind}: {option}", around((kind, attributes)), refused) for kind in kinds]


ALL_STEPS: list[Operator] = [channels, conv(), ("Relu",), ("MaxPool", {"kernel_shape": [6]}), ("Flatten",), dense(FILTERS, 2)]
POOLS = ("MaxPool", "AveragePool")
CASES = [
    _conv("width 1, without bias", width=1, bias=False),
    _conv("pads on the left (causal)", pads=[2, 0]),
    _conv("more pads than the width", pads=[5, 4]),
    _conv("strides and dilations", strides=[2], dilations=[2], pads=[2, 1]),
    _conv("group 3", inputs=6, group=3, filters=6),
    *(_conv(f"auto_pad {way}, even width", auto_pad=way, width=4) for way in ("SAME_UPPER", "SAME_LOWER")),
    _conv("auto_pad SAME_UPPER with strides", auto_pad="SAME_UPPER", width=4, strides=[2]),
    _conv("auto_pad SAME_LOWER with strides", auto_pad="SAME_LOWER", width=4, strides=[3]),
    _conv("auto_pad VALID", auto_pad="VALID"),
    _conv("a kernel that is larger than its weights", "kernel_shape", kernel_shape=[5]),
    _conv("negative pads", "do not fit its kernel", pads=[-1, 0]),
    _case("Conv: over an image whose rows are the steps, with pads", image(pads=[2, 0, 2, 0])),
    _case("Conv: over an image whose columns are the steps", image(transposed=True)),
    _case("Conv: over an image, with pads along the columns", image(pads=[0, 1, 0, 1]), "moves along another axis"),
    _padded("uneven pads", 1, 3),
    _padded("fewer steps (negative pads)", -1, 0, "leaves out steps"),
    _padded('mode "reflect"', 1, 1, "pads with other numbers than zero", mode="reflect"),
    _cut("both ends are cut", 1, 1),
    _cut("more than the pads is cut", 0, 3, "only the padding of a convolution"),
    _case("BatchNormalization: before the activation", around(conv(pads=[1, 1]), batch_norm, ("Relu",))),
    _case("BatchNormalization: after the activation", around(conv(pads=[1, 1]), ("Relu",), batch_norm)),
    _case("gated linear unit of slices", around(conv(filters=8, pads=[2, 0]), gate(by_slices=True))),
    _case("gated tanh", around(conv(filters=8, pads=[2, 0]), gate(with_tanh=True))),
    _case("Concat: several widths, as many steps", parallel((3, (1, 1)), (1, (0, 0)), (5, (2, 2)))),
    _case("Concat: windows of other positions", parallel((3, (2, 0)), (2, (0, 1)))),
    _case("Concat: another number of steps", parallel((3, (0, 0)), (2, (0, 0))), "joins tensors"),
    _case("text CNN with pads", parallel((2, (3, 3)), (4, (3, 3)), pool="Relu")),
    _case("text CNN with Tanh", parallel((2, (0, 0)), (3, (0, 0)), pool="Tanh"), "A text_cnn has convolutions"),
    _case("text CNN of several pads", parallel((2, (1, 1)), (4, (3, 3)), pool="Relu"), "each with as many padding steps"),
    _case("text CNN with different numbers of filters", text_cnn),
    _case("text CNN, activation after the pool", partial(text_cnn, before=False)),
    _case("text CNN with means", partial(text_cnn, pool="GlobalAveragePool"), "joins the pools"),
    _case("MaxPool: over all steps of a graph of fixed length", graph(*ALL_STEPS, shape=("batch", 8, FEATURES)), lengths=[8]),
    *_pool("window 3, strides 2", "MaxPool", kernel_shape=[3], strides=[2]),
    *_pool("uneven pads", *POOLS, kernel_shape=[3], pads=[0, 2], strides=[2]),
    *_pool("auto_pad SAME_UPPER", "MaxPool", kernel_shape=[3], strides=[2], auto_pad="SAME_UPPER"),
    *_pool("auto_pad SAME_LOWER", "AveragePool", kernel_shape=[4], strides=[3], auto_pad="SAME_LOWER"),
    *_pool("ceil_mode", *POOLS, refused="ceil_mode is 1", kernel_shape=[2], strides=[2], ceil_mode=1),
    *_pool("count_include_pad", "AveragePool", kernel_shape=[3], pads=[1, 1], count_include_pad=1),
    *(_case(f"{name}: over all steps", whole_pool(name)) for name in ("GlobalMaxPool", "GlobalAveragePool")),
    *(_case(f"{name}: keepdims 1", whole_pool(name, axes=[1])) for name in ("ReduceMax", "ReduceMean")),
    _case("ReduceMean: negative axis", whole_pool("ReduceMean", axes=[-2], keepdims=0)),
    _case("ReduceMax: over the columns", whole_pool("ReduceMax", axes=[2], keepdims=0), "it reduces 5 columns"),
    _case("ReduceMean: over the batch", whole_pool("ReduceMean", axes=[0], keepdims=0), "reduces the axis of batch"),
    _case("ReduceMin: any", whole_pool("ReduceMin", axes=[1], keepdims=0), "cannot be imported"),
    _case("several pools", graph(dense(FEATURES, 5), joined_pools, dense(10, 2))),
]
