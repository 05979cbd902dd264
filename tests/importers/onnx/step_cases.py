"""Operators of ONNX that work on single steps: embeddings, products, norms, activations, and the parts of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from tests.importers.onnx.case import Case
from tests.importers.onnx.graphs import FEATURES, VOCABULARY, Net

WIDTH = 5


def on_steps(build: Callable[[Net, str], str], **options: Any) -> ModelProto:
    """Return a graph of a dense layer, and of the nodes that `build` adds, that answers every step."""
    net = Net(**options)
    return net.model(build(net, net.dense("x", FEATURES, WIDTH)))


def on_vector(build: Callable[[Net, str], str]) -> ModelProto:
    """Return a graph of a dense layer and the mean over time, and of the nodes that `build` adds."""
    net = Net()
    return net.model(build(net, net.add("ReduceMean", net.dense("x", FEATURES, WIDTH), axes=[1], keepdims=0)))


def number(net: Net, value: float) -> str:
    return net.constant(np.array(value, np.float32))


def embedding(*, of_int32: bool = False, axis: int = 0, rows: int = VOCABULARY, offset: int = 0) -> ModelProto:
    net = Net(ids=True)
    ids = net.add("Cast", "x", to=TensorProto.INT32) if of_int32 else "x"
    ids = net.add("Add", ids, net.constant(np.array(offset))) if offset else ids
    return net.model(net.dense(net.add("Gather", net.weight(rows, FEATURES), ids, axis=axis), FEATURES, WIDTH))


def ids_of_floats() -> ModelProto:
    """Return a graph over token ids that come as floats, which tf2onnx writes for models with an Input of floats."""
    net = Net(("batch", "steps"))
    ids = net.add("Cast", "x", to=TensorProto.INT32)
    return net.model(net.dense(net.add("Gather", net.weight(VOCABULARY, FEATURES), ids), FEATURES, WIDTH))


def normalised_embedding() -> ModelProto:
    net = Net(ids=True)
    x = net.add("Gather", net.weight(VOCABULARY, FEATURES), "x")
    return net.model(net.add("Mul", x, number(net, 3.0)))


def bag_of_words() -> ModelProto:
    net = Net(ids=True)
    x = net.add("ReduceMean", net.add("Gather", net.weight(VOCABULARY, FEATURES), "x"), axes=[1], keepdims=0)
    return net.model(net.add("Softmax", net.dense(x, FEATURES, 3)))


def gemm(*, bias: Sequence[int] | None = (4,), **attributes: Any) -> ModelProto:
    def build(net: Net, x: str) -> str:
        shape = (4, WIDTH) if attributes.get("transB") else (WIDTH, 4)
        return net.add("Gemm", x, net.weight(*shape), *([] if bias is None else [net.weight(*bias)]), **attributes)

    return on_vector(build)


def matmul(*shape: int, right: bool = True) -> ModelProto:
    def build(net: Net, x: str) -> str:
        return net.add("MatMul", x, net.weight(*shape)) if right else net.add("MatMul", net.weight(*shape), x)

    return on_steps(build)


def batch_norm(*, epsilon: float = 1e-5, training: int = 0) -> ModelProto:
    net = Net(("batch", FEATURES, "steps"))
    statistics = [net.weight(FEATURES), net.weight(FEATURES), net.weight(FEATURES), net.positive(FEATURES)]
    attributes = {"training_mode": 1} if training else {}
    y = net.add("BatchNormalization", "x", *statistics, epsilon=epsilon, **attributes)
    return net.model(net.add("Transpose", y, perm=[0, 2, 1]))


def layer_norm(*, axis: int = -1, bias: bool = True, epsilon: float = 1e-5) -> ModelProto:
    def build(net: Net, x: str) -> str:
        weights = [net.weight(WIDTH), *([net.weight(WIDTH)] if bias else [])]
        return net.add("LayerNormalization", x, *weights, axis=axis, epsilon=epsilon)

    return on_steps(build)


def elementwise(*names: str, **attributes: Any) -> Callable[[Net, str], str]:
    """Apply operators of one input in a row."""

    def build(net: Net, x: str) -> str:
        for name in names:
            x = net.add(name, x, **attributes)
        return x

    return build


def gelu(*, with_tanh: bool = False, half_first: bool = False) -> Callable[[Net, str], str]:
    """Write gelu as exporters do."""

    def build(net: Net, x: str) -> str:
        if with_tanh:
            cube = net.add("Mul", net.add("Pow", x, number(net, 3.0)), number(net, 0.044715))
            inner = net.add("Tanh", net.add("Mul", net.add("Add", x, cube), number(net, 0.7978846)))
        else:
            inner = net.add("Erf", net.add("Div", x, number(net, 1.4142135)))
        gate = net.add("Add", inner, number(net, 1.0))
        if half_first:
            return net.add("Mul", net.add("Mul", x, number(net, 0.5)), gate)
        return net.add("Mul", net.add("Mul", x, gate), number(net, 0.5))

    return build


def hard_sigmoid(net: Net, x: str) -> str:
    return net.add(
        "Div", net.add("Clip", net.add("Add", x, number(net, 3.0)), number(net, 0.0), number(net, 6.0)), number(net, 6.0)
    )


def times(inner: Callable[[Net, str], str]) -> Callable[[Net, str], str]:
    """Multiply by a function of itself, as silu is written."""
    return lambda net, x: net.add("Mul", x, inner(net, x))


def clip(low: float | None, high: float | None) -> Callable[[Net, str], str]:
    return lambda net, x: net.add("Clip", x, *("" if limit is None else number(net, limit) for limit in (low, high)))


def by_constant(operator: str, *shape: int, first: bool = False) -> Callable[[Net, str], str]:
    """Combine with a constant, as the second or the first operand."""

    def build(net: Net, x: str) -> str:
        constant = net.positive(*shape)
        return net.add(operator, constant, x) if first else net.add(operator, x, constant)

    return build


def chosen(comparison: str, limit: float, low: float, high: float | None = None) -> Callable[[Net, str], str]:
    """Take a number where the tensor is on one side of a limit, and another number or the tensor elsewhere."""

    def build(net: Net, x: str) -> str:
        condition = net.add(comparison, x, number(net, limit))
        return net.add("Where", condition, number(net, low), x if high is None else number(net, high))

    return build


def step(net: Net, x: str) -> str:
    return net.add("Cast", net.add("Greater", x, number(net, 0.0)), to=TensorProto.FLOAT)


def softplus_by_choice(net: Net, x: str) -> str:
    large = net.add("Greater", x, number(net, 20.0))
    return net.add("Where", large, x, net.add("Log", net.add("Add", net.add("Exp", x), number(net, 1.0))))


def chosen_by_column(net: Net, x: str) -> str:
    return net.add("Where", net.constant(np.array([True, False, True, True, False])), x, number(net, 0.0))


def prelu(*shape: int) -> Callable[[Net, str], str]:
    return lambda net, x: net.add("PRelu", x, net.positive(*shape))


def softmax(operator: str = "Softmax", *, axis: int = -1, then: str = "") -> Callable[[Net, str], str]:
    def build(net: Net, x: str) -> str:
        y = net.add(operator, x, axis=axis)
        return net.add(then, y) if then else y

    return build


def attention(form: str = "sum", *, hidden: bool = True, activation: str = "Tanh", over: str = "") -> ModelProto:
    """Return a graph with an attention pool. form: how its sum is written; over: an operator on the steps that are weighed."""
    net = Net()
    y = net.dense("x", FEATURES, WIDTH)
    inner = net.add(activation, net.dense(y, WIDTH, 4)) if hidden else y
    y = net.add(over, y) if over else y
    scores = net.add("MatMul", inner, net.weight(4 if hidden else WIDTH, 1))
    weights = net.add("Softmax", scores, axis=1)
    if form == "sum":
        pooled = net.add("ReduceSum", net.add("Mul", weights, y), net.constant([1]), keepdims=0)
    elif form == "row":
        pooled = net.add("Squeeze", net.add("MatMul", net.add("Transpose", weights, perm=[0, 2, 1]), y), net.constant([1]))
    else:
        pooled = net.add("Squeeze", net.add("MatMul", net.add("Transpose", y, perm=[0, 2, 1]), weights), net.constant([2]))
    return net.model(net.dense(pooled, WIDTH, 2))


def residual() -> ModelProto:
    net = Net()
    y = net.dense("x", FEATURES, WIDTH)
    return net.model(net.add("Add", y, net.add("Tanh", net.dense(y, WIDTH, WIDTH))))


def head(*last: str, labels: int = 3, hidden: bool = False) -> ModelProto:
    def build(net: Net, x: str) -> str:
        x = net.add("Relu", net.dense(x, WIDTH, 4)) if hidden else x
        x = net.dense(x, 4 if hidden else WIDTH, labels)
        return elementwise(*last)(net, x)

    return on_vector(build)


def head_of_input() -> ModelProto:
    net = Net()
    return net.model(net.add("Softmax", net.dense(net.add("ReduceMax", "x", axes=[1], keepdims=0), FEATURES, 2)))


def moved(operator: str, *rest: Any, **attributes: Any) -> ModelProto:
    """Return a graph with an operator on the steps that moves numbers."""
    return on_steps(lambda net, x: net.add(operator, x, *(net.constant(each) for each in rest), **attributes))


def columns(*starts: int, size: int = 2) -> ModelProto:
    """Return a graph that answers some columns, in another order."""

    def build(net: Net, x: str) -> str:
        parts = [net.add("Slice", x, *(net.constant([at]) for at in (start, start + size, 2))) for start in starts]
        return net.add("Concat", *parts, axis=2)

    return on_steps(build)


def one_step(index: int, *, keep_axis: bool = False) -> ModelProto:
    """Return a graph that answers one step."""

    def build(net: Net, x: str) -> str:
        taken = net.add("Gather", x, net.constant(np.array([index] if keep_axis else index)), axis=1)
        return net.add("Squeeze", taken, net.constant([1])) if keep_axis else taken

    return on_steps(build)


def with_shape() -> ModelProto:
    """Return a graph that computes the shape of a reshape, as exporters write it."""

    def build(net: Net, x: str) -> str:
        sizes = [net.add("Gather", net.add("Shape", x), net.constant([index]), axis=0) for index in (0, 1)]
        rows = net.add("Mul", *sizes)
        flat = net.add("Reshape", x, net.add("Concat", rows, net.constant([WIDTH]), axis=0))
        y = net.dense(flat, WIDTH, 4)
        return net.add("Reshape", y, net.add("Concat", *sizes, net.constant([-1]), axis=0))

    return on_steps(build)


def _steps(operator: str, option: str, build: Callable[[Net, str], str], refused: str = "", **options: Any) -> Case:
    return Case(operator, option, partial(on_steps, build, **options), refused)


def _unimportable(operator: str, inputs: int = 1, **attributes: Any) -> Case:
    def build(net: Net, x: str) -> str:
        return net.add(operator, x, *(net.weight(WIDTH) for _ in range(inputs - 1)), **attributes)

    return _steps(operator, "any", build, "cannot be imported")


CASES = [
    Case("Gather", "embedding", embedding),
    Case("Gather", "ids cast to int32", partial(embedding, of_int32=True)),
    Case("Gather", "ids of an input of floats", ids_of_floats),
    Case("Gather", "ids plus a number", partial(embedding, rows=VOCABULARY + 2, offset=2), "not rows of the table"),
    Case("Gather", "embedding along axis 1", partial(embedding, axis=1), "one row for each token id"),
    Case("Gather, Mul", "embedding times a number", normalised_embedding),
    Case("Gather, ReduceMean", "bag of words", bag_of_words),
    Case("Gemm", "weights as they are", gemm),
    Case("Gemm", "transB", partial(gemm, transB=1)),
    Case("Gemm", "alpha and beta", partial(gemm, transB=1, alpha=0.5, beta=2.0)),
    Case("Gemm", "without C", partial(gemm, bias=None)),
    Case("Gemm", "C of shape (1, width)", partial(gemm, bias=(1, 4))),
    Case("Gemm", "C of shape (1,)", partial(gemm, bias=(1,))),
    Case("MatMul", "with a matrix", partial(matmul, WIDTH, 4)),
    Case("MatMul", "with a matrix of shape (1, inputs, width)", partial(matmul, 1, WIDTH, 4)),
    Case("MatMul", "with a matrix for each sequence", partial(matmul, 2, WIDTH, 4), "weights have the shape"),
    Case("MatMul", "a matrix from the left", partial(matmul, 4, 7, right=False), "multiplies a matrix by the tensor"),
    Case("BatchNormalization", "over features", batch_norm, axes=(0, 2, 1)),
    Case("BatchNormalization", "epsilon", partial(batch_norm, epsilon=0.1), axes=(0, 2, 1)),
    Case("BatchNormalization", "training_mode", partial(batch_norm, training=1), "training_mode is 1"),
    Case("LayerNormalization", "last axis", layer_norm),
    Case("LayerNormalization", "epsilon, without B", partial(layer_norm, epsilon=0.1, bias=False)),
    Case("LayerNormalization", "axis 1", partial(layer_norm, axis=1), "normalises several axes"),
    *(
        _steps(name, "with its defaults", elementwise(name))
        for name in (
            "Relu",
            "Sigmoid",
            "Tanh",
            "Softplus",
            "Softsign",
            "Elu",
            "Selu",
            "LeakyRelu",
            "HardSigmoid",
            "ThresholdedRelu",
        )
    ),
    _steps("Celu", "alpha 1", elementwise("Celu")),
    _steps("Celu", "another alpha", elementwise("Celu", alpha=2.0), "only alpha = 1"),
    _steps("Elu", "alpha", elementwise("Elu", alpha=0.3)),
    _steps("LeakyRelu", "alpha", elementwise("LeakyRelu", alpha=0.2)),
    _steps("ThresholdedRelu", "alpha", elementwise("ThresholdedRelu", alpha=0.4)),
    _steps("HardSigmoid", "alpha and beta", elementwise("HardSigmoid", alpha=0.3, beta=0.4)),
    _steps("Selu", "custom alpha and gamma", elementwise("Selu", alpha=1.5, gamma=1.2), "no activation of model.toml"),
    _steps("Exp", "as an activation", elementwise("Exp")),
    _steps("Gelu", "exact", elementwise("Gelu"), opset=20),
    _steps("Gelu", 'approximate "tanh"', elementwise("Gelu", approximate="tanh"), opset=20),
    _steps("HardSwish", "any", elementwise("HardSwish"), "no activation of model.toml"),
    _steps("PRelu", "one slope", prelu(1)),
    _steps("PRelu", "a slope for each column", prelu(WIDTH), "slope for each column"),
    _steps("Div, Erf, Add, Mul", "gelu", gelu()),
    _steps("Div, Erf, Add, Mul", "gelu, halved first", gelu(half_first=True)),
    _steps("Pow, Mul, Add, Tanh", "gelu with tanh", gelu(with_tanh=True)),
    _steps("Sigmoid, Mul", "silu", times(elementwise("Sigmoid"))),
    _steps("Add, Clip, Div", "hard sigmoid", hard_sigmoid),
    _steps("Add, Clip, Div, Mul", "hard swish", times(hard_sigmoid), "no activation of model.toml"),
    _steps("Softplus, Tanh, Mul", "mish", times(elementwise("Softplus", "Tanh")), "no activation of model.toml"),
    _steps("LessOrEqual, Where", "relu", chosen("LessOrEqual", 0.0, 0.0)),
    _steps("LessOrEqual, Where", "thresholded relu", chosen("LessOrEqual", 1.0, 0.0), "no activation of model.toml"),
    _steps("Greater, Cast", "a step", step, "no activation of model.toml"),
    _steps("Greater, Where", "softplus", softplus_by_choice),
    _steps("Greater, Where", "one of two numbers", chosen("Greater", 0.0, 1.0, -1.0), "no activation of model.toml"),
    _steps("Where", "by a constant for each column", chosen_by_column, "cannot be imported"),
    _steps("Clip", "from 0 to 6", clip(0, 6)),
    _steps("Clip", "from -1 to 1", clip(-1, 1)),
    _steps("Clip", "from 0", clip(0, None)),
    _steps("Clip", "to 1", clip(None, 1), "no activation of model.toml"),
    *(_steps(name, "one constant", by_constant(name, 1)) for name in ("Add", "Sub", "Mul", "Div")),
    *(_steps(name, "a constant for each column", by_constant(name, WIDTH)) for name in ("Add", "Sub", "Mul", "Div")),
    *(_steps(name, "from a constant", by_constant(name, WIDTH, first=True)) for name in ("Add", "Sub", "Mul")),
    _steps("Div", "a constant by the tensor", by_constant("Div", 1, first=True), "no activation of model.toml"),
    _steps("Add", "a constant for each step", by_constant("Add", 10007, 1), "for each of the steps"),
    *(_steps(name, "any", elementwise(name), "no activation of model.toml") for name in ("Sqrt", "Log", "Reciprocal")),
    *(_steps(name, "any", elementwise(name)) for name in ("Abs", "Neg")),
    _steps("Identity", "any", elementwise("Identity")),
    _steps("Dropout", "in a trained model", elementwise("Dropout")),
    _steps("Softmax", "of every step (tag)", softmax()),
    _steps("LogSoftmax", "of every step (tag)", softmax("LogSoftmax")),
    Case("LogSoftmax", "of a vector", partial(head, "LogSoftmax")),
    Case("Softmax", "of a vector", partial(head, "Softmax")),
    Case("LogSoftmax, Exp", "of a vector", partial(head, "LogSoftmax", "Exp"), "followed by other operations"),
    Case("Softmax", "over steps, without a sum", partial(on_steps, softmax(axis=1)), "only an attention pool"),
    Case("Softmax", "before another operator", partial(head, "Softmax", "Relu"), "followed by other operations"),
    Case("Sigmoid", "of one number", partial(head, "Sigmoid", labels=1)),
    Case("Sigmoid", "of several numbers (multi_label)", partial(head, "Sigmoid")),
    Case("ReduceMax, Softmax", "of the input itself", head_of_input),
    Case("Relu, Softmax", "head with a hidden layer", partial(head, "Softmax", hidden=True)),
    Case("Tanh", "of the answer (regress)", partial(head, "Tanh", labels=2)),
    *(
        Case("Softmax, Mul, ReduceSum" if form == "sum" else "Softmax, MatMul", option, partial(attention, form, hidden=hidden))
        for form, place in (("sum", ""), ("row", " from the left"), ("column", " from the right"))
        for hidden, option in ((True, f"attention pool{place}"), (False, f"attention pool{place} without a hidden layer"))
    ),
    Case("Softmax, MatMul", "attention with ReLU", partial(attention, activation="Relu"), "by another score than"),
    Case("Softmax, MatMul", "attention over other steps", partial(attention, over="Relu"), "weighs other steps"),
    Case("Add", "residual connection around a dense layer", residual, "adds two tensors"),
    _steps("Transpose", "and back", elementwise("Transpose", "Transpose", perm=[0, 2, 1])),
    Case("Shape, Gather, Mul, Reshape", "the batch and the steps as one axis", with_shape),
    Case("Slice, Concat", "columns in another order", partial(columns, 3, 1)),
    Case("Slice, Concat", "columns that occur twice", partial(columns, 1, 1)),
    Case("Slice", "every second step", partial(moved, "Slice", [0], [1 << 40], [1], [2]), "takes some of the steps"),
    Case("Slice", "the steps after the first", partial(moved, "Slice", [1], [1 << 40], [1]), "leaves out steps"),
    Case("Gather", "the last step", partial(one_step, -1)),
    Case("Gather", "the first step", partial(one_step, 0, keep_axis=True)),
    Case("Gather", "the second step", partial(one_step, 1), "takes the step 1"),
    Case("Gather", "the last step but one", partial(one_step, -2), "takes the step -2"),
    *(_unimportable(name) for name in ("Sin", "Sign", "Round", "Ceil", "IsNaN", "CumSum", "Hardmax", "Size", "NonZero")),
    *(_unimportable(name, 2) for name in ("And", "BitShift", "Einsum", "GridSample")),
]
