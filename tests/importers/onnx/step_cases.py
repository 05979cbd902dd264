"""Operators of ONNX that work on single steps: embeddings, products, norms, activations, and the parts of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from tests.importers.onnx.graphs import CHANNELS_FIRST, FEATURES, VOCABULARY, Case, Net, Operator, channels, dense, graph

WIDTH = 5
MEAN: Operator = ("ReduceMean", {"axes": [1], "keepdims": 0})
INT32: Operator = ("Cast", {"to": TensorProto.INT32})
NO_ACTIVATION = "no activation of model.toml"


def steps(name: str, *operators: Operator, refused: str = "", **options: Any) -> Case:
    """Return a case of a dense layer and a chain over it that answers every step. options: of Net."""
    return Case(name, graph(lambda net, x: net.chain(net.dense(x, FEATURES, WIDTH), *operators), **options), refused)


def vector(name: str, *operators: Operator, refused: str = "") -> Case:
    """Return a case of a dense layer, the mean over time, and a chain over that."""
    return steps(name, MEAN, lambda net, x: net.chain(x, *operators), refused=refused)


def mean_by_size(net: Net, x: str) -> str:
    """Divide the sum of all steps by the size of the input's axis of steps."""
    size = net.add("Cast", net.add("Shape", "x", start=1, end=2), to=TensorProto.FLOAT)
    return net.add("Div", net.chain(x, ("ReduceSum", [1], {"keepdims": 0})), size)


def head(name: str, *last: Operator, labels: int = 3, refused: str = "") -> Case:
    return vector(name, dense(WIDTH, labels), *last, refused=refused)


def embedding(rows: int = VOCABULARY, axis: int = 0) -> Operator:
    return lambda net, ids: net.add("Gather", net.weight(rows, FEATURES), ids, axis=axis)


def over_ids(*operators: Operator) -> Any:
    """Return a graph of a chain over ids and a dense layer."""
    return graph(*operators, dense(FEATURES, WIDTH), ids=True)


def gemm(option: str, *, bias: Sequence[int] | None = (4,), **attributes: Any) -> Case:
    def build(net: Net, x: str) -> str:
        shape = (4, WIDTH) if attributes.get("transB") else (WIDTH, 4)
        return net.add("Gemm", x, net.weight(*shape), *([] if bias is None else [net.weight(*bias)]), **attributes)

    return vector(f"Gemm: {option}", build)


def with_weights(operator: str, *shapes: Sequence[int], first: bool = False, **attributes: Any) -> Operator:
    """Return an operator of the tensor and positive weights of these shapes. first: whether the weights are the first operands."""

    def build(net: Net, x: str) -> str:
        weights = [net.positive(*shape) for shape in shapes]
        return net.add(operator, *([*weights, x] if first else [x, *weights]), **attributes)

    return build


def batch_norm(option: str, refused: str = "", **attributes: Any) -> Case:
    norm = with_weights("BatchNormalization", *[[FEATURES]] * 4, **attributes)
    build = graph(norm, channels, shape=("batch", FEATURES, "steps"))
    return Case(f"BatchNormalization: {option}", build, refused, axes=CHANNELS_FIRST)


def attention(form: str = "sum", *, hidden: bool = True, activation: str = "Tanh", over: str = "") -> Any:
    """Return a graph with an attention pool. form: how its sum is written; over: an operator on the steps that are weighed."""
    swapped: Operator = ("Transpose", {"perm": [0, 2, 1]})

    def build(net: Net, x: str) -> str:
        y = net.dense(x, FEATURES, WIDTH)
        inner = net.add(activation, net.dense(y, WIDTH, 4)) if hidden else y
        y = net.add(over, y) if over else y
        scores = net.add("MatMul", inner, net.weight(4 if hidden else WIDTH, 1))
        weights = net.add("Softmax", scores, axis=1)
        if form == "sum":
            return net.chain(weights, ("Mul", y), ("ReduceSum", [1], {"keepdims": 0}))
        if form == "row":
            return net.chain(weights, swapped, ("MatMul", y), ("Squeeze", [1]))
        return net.chain(y, swapped, ("MatMul", weights), ("Squeeze", [2]))

    return graph(build, dense(WIDTH, 2))


def columns(*starts: int) -> Operator:
    """Return two columns from each start, joined."""

    def build(net: Net, x: str) -> str:
        return net.add("Concat", *(net.chain(x, ("Slice", [start], [start + 2], [2])) for start in starts), axis=2)

    return build


def one_step(index: Any) -> Operator:
    return ("Gather", np.array(index), {"axis": 1})


def one_axis_of_batch_and_steps(net: Net, x: str) -> str:
    """Compute the shape of a reshape, as exporters write it."""
    sizes = [net.chain(x, ("Shape",), ("Gather", [index], {"axis": 0})) for index in (0, 1)]
    flat = net.add("Reshape", x, net.add("Concat", net.add("Mul", *sizes), net.constant([WIDTH]), axis=0))
    return net.add("Reshape", net.dense(flat, WIDTH, 4), net.add("Concat", *sizes, net.constant([-1]), axis=0))


def two_pools(net: Net, x: str) -> str:
    return net.add("Concat", net.chain(x, one_step(-1)), net.add("ReduceMax", x, axes=[1], keepdims=0), axis=1)


def softplus_by_choice(net: Net, x: str) -> str:
    large, soft = net.chain(x, ("Greater", 20.0)), net.chain(x, ("Exp",), ("Add", 1.0), ("Log",))
    return net.add("Where", large, x, soft)


HARD_SIGMOID: list[Operator] = [("Add", 3.0), ("Clip", 0.0, 6.0), ("Div", 6.0)]
GELU_TANH: list[Operator] = [
    lambda net, x: net.chain(x, ("Pow", 3.0), ("Mul", 0.044715), ("Add", "x"), ("Mul", 0.7978846), ("Tanh",)),
    *(("Add", 1.0), ("Mul", "x"), ("Mul", 0.5)),
]
ARITHMETIC = ("Add", "Sub", "Mul", "Div")
ACTIVATIONS: dict[str, list[Operator]] = {
    **{
        name: [(name,)]
        for name in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Elu", "Selu", "LeakyRelu", "Celu", "Exp")
    },
    **{f"{name}: any": [(name,)] for name in ("HardSigmoid", "ThresholdedRelu", "Abs", "Neg", "Identity", "Dropout")},
    **{f"{name}: alpha": [(name, {"alpha": 0.3})] for name in ("Elu", "LeakyRelu", "ThresholdedRelu")},
    "HardSigmoid: alpha and beta": [("HardSigmoid", {"alpha": 0.3, "beta": 0.4})],
    "PRelu: one slope": [with_weights("PRelu", [1])],
    "gelu": [("Div", 1.4142135), ("Erf",), ("Add", 1.0), ("Mul", "x"), ("Mul", 0.5)],
    "gelu with tanh": GELU_TANH,
    "silu": [("Sigmoid",), ("Mul", "x", "_")],
    "hard sigmoid": HARD_SIGMOID,
    "relu by choice": [("LessOrEqual", 0.0), ("Where", "_", 0.0, "x")],
    "softplus by choice": [softplus_by_choice],
    "Clip: from 0 to 6": [("Clip", 0.0, 6.0)],
    "Clip: from -1 to 1": [("Clip", -1.0, 1.0)],
    "Clip: from -0.25 to 2": [("Clip", -0.25, 2.0)],
    "Clip: from 0": [("Clip", 0.0, None)],
    "Clip: to 1": [("Clip", None, 1.0)],
    **{f"{name}: a constant for each column": [with_weights(name, [WIDTH])] for name in ARITHMETIC},
    **{f"{name}: from a constant": [with_weights(name, [WIDTH], first=True)] for name in ARITHMETIC[:3]},
}
REFUSED: dict[str, tuple[list[Operator], str]] = {
    "Celu: another alpha": ([("Celu", {"alpha": 2.0})], "only alpha = 1"),
    "Selu: custom alpha and gamma": ([("Selu", {"alpha": 1.5, "gamma": 1.2})], NO_ACTIVATION),
    "PRelu: a slope for each column": ([with_weights("PRelu", [WIDTH])], "slope for each column"),
    "a step": ([("Greater", 0.0), ("Cast", {"to": TensorProto.FLOAT})], NO_ACTIVATION),
    "Where: by a constant": ([("Where", np.array([True, False, True, True, False]), "_", 0.0)], "cannot be imported"),
    "Add: a constant for each step": ([with_weights("Add", [10007, 1])], "for each of the steps"),
    "LayerNormalization: axis 1": ([with_weights("LayerNormalization", [WIDTH], [WIDTH], axis=1)], "normalises several axes"),
    "LayerNormalization: of two pools": ([two_pools, with_weights("LayerNormalization", [2 * WIDTH])], "follows the pool"),
    "Softmax: over steps, without a sum": ([("Softmax", {"axis": 1})], "only an attention pool"),
    "Slice: every second step": ([("Slice", [0], [1 << 40], [1], [2])], "takes some of the steps"),
    "Slice: the steps after the first": ([("Slice", [1], [1 << 40], [1])], "leaves out steps"),
    "Gather: the last step but one": ([one_step(-2)], "takes the step -2"),
    "MatMul: a matrix for each sequence": ([with_weights("MatMul", [2, WIDTH, 4])], "weights have the shape"),
    "MatMul: a matrix from the left": ([with_weights("MatMul", [4, 7], first=True)], "multiplies a matrix by the tensor"),
    "CumSum: any": ([("CumSum", 1)], "cannot be imported"),
}
CASES = [
    Case("Gather: ids cast to int32", over_ids(INT32, embedding())),
    Case("Gather: ids of an input of floats", graph(INT32, embedding(), shape=("batch", "steps"))),
    Case("Gather: ids plus a number", over_ids(("Add", np.array(2)), embedding(VOCABULARY + 2)), "not rows of the table"),
    Case("Gather: embedding along axis 1", over_ids(embedding(axis=1)), "one row for each token id"),
    Case("Gather, Mul: embedding times a number", graph(embedding(), ("Mul", 3.0), ids=True)),
    Case("Gather, ReduceMean: bag of words", over_ids(embedding(), MEAN)),
    gemm("transB, alpha and beta", transB=1, alpha=0.5, beta=2.0),
    gemm("without C", bias=None),
    gemm("C of shape (1,)", bias=(1,)),
    steps("MatMul: with a matrix of shape (1, inputs, width)", with_weights("MatMul", [1, WIDTH, 4])),
    batch_norm("epsilon", epsilon=0.1),
    batch_norm("training_mode", "training_mode is 1", training_mode=1),
    steps("LayerNormalization: last axis", with_weights("LayerNormalization", [WIDTH], [WIDTH], axis=-1)),
    steps("LayerNormalization: epsilon, without B", with_weights("LayerNormalization", [WIDTH], axis=-1, epsilon=0.1)),
    *(steps(name, *operators) for name, operators in ACTIVATIONS.items()),
    steps("Gelu: exact", ("Gelu",), opset=20),
    steps('Gelu: approximate "tanh"', ("Gelu", {"approximate": "tanh"}), opset=20),
    *(steps(name, *operators, refused=refused) for name, (operators, refused) in REFUSED.items()),
    steps("Softmax: of every step (tag)", ("Softmax", {"axis": -1})),
    head("LogSoftmax: of a vector", ("LogSoftmax",)),
    head("LogSoftmax, Exp: of a vector", ("LogSoftmax",), ("Exp",), refused="followed by other operations"),
    head("Sigmoid: of one number", ("Sigmoid",), labels=1),
    head("Sigmoid: of several numbers (multi_label)", ("Sigmoid",)),
    Case("Softmax: over a mean of the input itself", graph(MEAN, dense(FEATURES, 2), ("Softmax",))),
    head("head with a hidden layer", ("Relu",), dense(3, 2), ("Softmax",)),
    head("Tanh: of the answer (regress)", ("Tanh",), labels=2),
    Case("attention pool", attention()),
    Case("attention pool from the left without a hidden layer", attention("row", hidden=False)),
    Case("attention pool from the right", attention("column")),
    Case("attention with ReLU", attention(activation="Relu"), "by another score than"),
    Case("attention over other steps", attention(over="Relu"), "weighs other steps"),
    steps("Shape, Div: of the sum of steps", mean_by_size, refused="its numbers depend on the number of steps"),
    steps("residual connection", dense(WIDTH, WIDTH), ("Tanh",), ("Add", "x"), refused="adds two tensors"),
    steps("Transpose: and back", *[("Transpose", {"perm": [0, 2, 1]})] * 2),
    steps("Shape, Gather, Mul, Reshape: the batch and the steps as one axis", one_axis_of_batch_and_steps),
    steps("Slice, Concat: columns in another order", columns(3, 1)),
    steps("Slice, Concat: columns that occur twice", columns(1, 1)),
    steps("Gather: the last step", one_step(-1)),
    steps("Gather: the first step", one_step([0]), ("Squeeze", [1])),
]
