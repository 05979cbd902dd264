"""Functions of keras.ops between the layers of functional models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.importers.keras.builders import FEATURES, Build, Case

Connect = Callable[[Any, Any], Any]


def after_steps(connect: Connect, steps: int | None = None) -> Build:
    """Return a functional model. connect: returns its output, given the module `keras` and the steps of a recurrent layer."""

    def build(keras: Any) -> Any:
        start = keras.Input((steps, FEATURES))
        return keras.Model(start, connect(keras, keras.layers.GRU(4, return_sequences=True)(start)))

    return build


def attention(keras: Any, x: Any) -> Any:
    weights = keras.layers.Softmax(axis=1)(keras.layers.Dense(1, use_bias=False)(x))
    return keras.layers.Dense(2)(keras.ops.sum(x * weights, axis=1))


def attention_with_hidden_layer(keras: Any, x: Any) -> Any:
    scores = keras.layers.Dense(1, use_bias=False)(keras.layers.Dense(3, activation="tanh")(x))
    return keras.ops.sum(keras.layers.Multiply()([x, keras.ops.softmax(scores, axis=1)]), axis=1)


def attention_by_dot(keras: Any, x: Any) -> Any:
    weights = keras.layers.Softmax(axis=1)(keras.layers.Dense(1)(x))
    return keras.layers.Flatten()(keras.layers.Dot(axes=1)([x, weights]))


def attention_by_product(keras: Any, x: Any) -> Any:
    weights = keras.ops.softmax(keras.layers.Dense(1)(x), axis=1)
    return keras.ops.squeeze(keras.ops.matmul(keras.ops.transpose(x, (0, 2, 1)), weights), axis=-1)


def flipped(keras: Any, x: Any) -> Any:
    """A forward layer, and a backward layer over reversed steps."""
    back = keras.ops.flip(keras.layers.LSTM(3, return_sequences=True)(keras.ops.flip(x, axis=1)), axis=1)
    return keras.ops.concatenate([keras.layers.LSTM(3, return_sequences=True)(x), back], axis=-1)


def reversed_by_slice(keras: Any, x: Any) -> Any:
    return keras.layers.LSTM(3)(x[:, ::-1])


def columns(keras: Any, x: Any) -> Any:
    return keras.layers.LSTM(3)(keras.ops.concatenate([x[..., 2:], x[:, :, :1], x[..., ::-1]], axis=2))


def shaped(keras: Any, x: Any) -> Any:
    last = keras.ops.expand_dims(x[:, -1], 1)
    return keras.layers.Dense(2)(keras.ops.reshape(keras.ops.squeeze(last, axis=1), (-1, 4)))


def last_state_of_both(keras: Any, x: Any) -> Any:
    both = keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True))(x)
    return keras.layers.Dense(2)(keras.ops.concatenate([both[:, -1, :3], both[:, 0, 3:]], axis=-1))


def function(name: str) -> Connect:
    return lambda keras, x: getattr(keras.ops, name)(x)


FUNCTIONS = (
    "relu",
    "relu6",
    "tanh",
    "sigmoid",
    "silu",
    "softplus",
    "softsign",
    "selu",
    "elu",
    "gelu",
    "exp",
    "leaky_relu",
    "hard_sigmoid",
)
CASES = (
    Case("GetItem", "x[:, -1, :]", after_steps(lambda keras, x: keras.layers.Dense(2)(x[:, -1, :]))),
    Case("GetItem", "x[:, 0]", after_steps(lambda _, x: x[:, 0])),
    Case("GetItem", "first and last step of a bidirectional layer", after_steps(last_state_of_both)),
    Case("GetItem", "x[:, ::-1]", after_steps(reversed_by_slice)),
    Case("GetItem", "columns", after_steps(columns)),
    Case("GetItem", "x[:, 1]", after_steps(lambda _, x: x[:, 1]), "takes the first or the last step"),
    Case("GetItem", "x[:, 1:]", after_steps(lambda _, x: x[:, 1:], steps=6), "takes the first or the last step"),
    Case("Sum, Mean, Max", "sum over the steps", after_steps(lambda keras, x: keras.ops.sum(x, axis=1))),
    Case(
        "Sum, Mean, Max", "mean over the steps", after_steps(lambda keras, x: keras.layers.Dense(2)(keras.ops.mean(x, axis=1)))
    ),
    Case(
        "Sum, Mean, Max",
        "maximum, keepdims",
        after_steps(lambda keras, x: keras.ops.squeeze(keras.ops.max(x, 1, keepdims=True), 1)),
    ),
    Case(
        "Sum, Mean, Max", "over the columns", after_steps(lambda keras, x: keras.ops.sum(x, axis=2)), "a pool reduces the steps"
    ),
    Case("Flip", "over the steps, and back", after_steps(flipped)),
    Case("Reshape, Squeeze, ExpandDims", "of a vector", after_steps(shaped)),
    Case("Softmax, Multiply, Sum", "attention pool", after_steps(attention)),
    Case("Softmax, Multiply, Sum", "attention pool with a hidden layer", after_steps(attention_with_hidden_layer)),
    Case("Softmax, Dot", "attention pool", after_steps(attention_by_dot)),
    Case("Softmax, Matmul", "attention pool", after_steps(attention_by_product)),
    *(Case("keras.ops", name, after_steps(function(name))) for name in FUNCTIONS),
    Case("keras.ops", "cumsum", after_steps(lambda keras, x: keras.ops.cumsum(x, axis=1)), "cannot be imported"),
)
