"""Convolutions, pools, layers of single steps, functions of keras.ops, whole models, and code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.importers.keras.builders import (
    FEATURES,
    STEPS,
    UNITS,
    Case,
    Layer,
    both,
    cell,
    dense,
    functional,
    imports,
    named,
    one,
    over_features,
    over_ids,
    refuses,
)

NOT_IMPORTED = "layers of this class cannot be imported"
conv = partial(one, "Conv1D", 4)
maximum = one("GlobalMaxPooling1D")


def _residual(keras: Any, x: Any, *, last: int = 2) -> Any:
    layers = keras.layers
    for dilation in (1, last):
        inner = layers.Conv1D(4, 2, padding="causal", dilation_rate=dilation, activation="relu")(x)
        inner = layers.Conv1D(4, 2, padding="causal", dilation_rate=dilation, activation="relu")(inner)
        x = layers.ReLU()(layers.Add()([inner, x if dilation > 1 else layers.Conv1D(4, 1)(x)]))
    return x


def _convolutions() -> list[Case]:
    windows: list[dict[str, Any]] = [
        {"kernel_size": 2, "padding": "same", "strides": 3},
        *({"kernel_size": 3, "padding": padding, "dilation_rate": 2} for padding in ("valid", "same", "causal")),
    ]
    return [
        *(imports(f"Conv1D: {named(window)}", conv(**window)) for window in windows),
        imports("Conv1D: groups, strides", conv(3, groups=2, padding="same", strides=2), features=4),
        imports("Conv1D: use_bias=False, gelu", conv(3, use_bias=False, activation="gelu")),
        imports("Conv1D: batch norm and ReLU after it", conv(3), one("BatchNormalization"), one("ReLU"), conv(3)),
        imports("DepthwiseConv1D: depth_multiplier=2", one("DepthwiseConv1D", 3, depth_multiplier=2)),
        imports("SeparableConv1D: same, relu", one("SeparableConv1D", 4, 3, padding="same", activation="relu")),
        refuses("Conv1D: channels first", "data_format is 'channels_first'", conv(3, data_format="channels_first"), steps=6),
        refuses("Conv1DTranspose: any", NOT_IMPORTED, one("Conv1DTranspose", 2, 2)),
        *(
            imports(f"{kind}: {named(window)}", one(kind, **window))
            for kind in ("MaxPooling1D", "AveragePooling1D")
            for window in ({"pool_size": 2}, {"pool_size": 3, "strides": 2, "padding": "same"})
        ),
        imports("MaxPooling1D: all steps", one("MaxPooling1D", 6), one("Flatten"), dense(), steps=6),
        imports("GlobalMaxPooling1D: as the output", conv(3), maximum),
        imports("GlobalAveragePooling1D: keepdims", conv(3), one("GlobalAveragePooling1D", keepdims=True), one("Flatten")),
        Case("Add: levels of a temporal convolutional network", functional(_residual)),
        Case("Add: other dilations", functional(partial(_residual, last=3)), "dilated by 1, 2, 4"),
        imports("Activation: glu after a convolution", one("Conv1D", 8, 2, padding="causal"), one("Activation", "glu")),
        imports("Cropping1D: after padding", one("ZeroPadding1D", 2), conv(3), one("Cropping1D", (0, 2))),
    ]


ACTIVATIONS = (
    *("linear", "relu", "relu6", "sigmoid", "hard_sigmoid", "tanh", "hard_tanh", "softplus", "softsign", "selu", "elu"),
    *("celu", "gelu", "silu", "leaky_relu", "exponential"),
)
OWN_LAYERS: list[tuple[str, dict[str, Any]]] = [
    *(("ReLU", option) for option in ({"max_value": 6.0}, {"max_value": 2.0}, {"negative_slope": 0.2}, {"threshold": 0.7})),
    *(("LeakyReLU", {"negative_slope": 0.05}), ("ELU", {"alpha": 0.5})),
]
WITHOUT_EFFECT = ("Dropout", "SpatialDropout1D", "GaussianNoise", "GaussianDropout", "AlphaDropout", "ActivityRegularization")


def per_step(kind: str, *arguments: Any) -> Layer:
    return lambda layers: layers.TimeDistributed(getattr(layers, kind)(*arguments))


NORMS = ("BatchNormalization", "LayerNormalization")
OF_STEPS = [
    *(imports(f"Dense: {name}", dense(4, name)) for name in ACTIVATIONS),
    *(imports(f"Activation: {name}", cell("GRU", **STEPS), one("Activation", name), more=True) for name in ACTIVATIONS),
    refuses("Activation: mish", "its activation is 'mish'", one("Activation", "mish")),
    *(imports(f"{kind}: {named(options)}", dense(4), one(kind, **options)) for kind, options in OWN_LAYERS),
    imports("PReLU: one slope", dense(1), one("PReLU", shared_axes=[1])),
    refuses("PReLU: a slope for each column", "a slope for each column", one("PReLU", shared_axes=[1])),
    imports("Dense: a layer as its activation", lambda layers: layers.Dense(4, activation=layers.LeakyReLU(0.1))),
    imports("Dense: use_bias=False", one("Dense", 4, use_bias=False)),
    imports("Softmax: last layer", dense(3), one("Softmax")),
    refuses("Softmax: over the steps", "only an attention pool with one score", one("Softmax", axis=1)),
    imports("TimeDistributed", cell("LSTM", **STEPS), per_step("Dense", 4, "relu"), per_step("LayerNormalization")),
    refuses("TimeDistributed: LSTM", "it applies LSTM", one("Reshape", (5, 3, 1)), per_step("LSTM", 2), steps=5),
    *(
        imports(f"{kind}: {named(options)}", dense(4), one(kind, **options))
        for kind in NORMS
        for options in ({"scale": False}, {"center": False}, {"epsilon": 0.1})
    ),
    imports("BatchNormalization: after a pool", conv(3), maximum, one("BatchNormalization"), dense()),
    *(refuses(f"{kind}: over the steps", "only the last axis", one(kind, axis=1), steps=5) for kind in NORMS),
    imports("Rescaling: scale and offset", one("Rescaling", 0.5, 1.0), cell("GRU")),
    imports("Normalization: adapted", one("Normalization"), cell("GRU")),
    imports("layers without effect", *(one(kind, 0.5) for kind in WITHOUT_EFFECT), cell("GRU"), one("Identity")),
    refuses("Reshape: of the steps", "makes one axis of 3 of steps", one("Reshape", (3, 6)), steps=6),
    refuses("Permute: steps and features", "and not batch, steps, columns", one("Permute", (2, 1)), cell("GRU"), steps=5),
    refuses("Flatten: all steps", "a model takes sequences of any length", one("Flatten"), steps=5),
    Case(
        "Reshape: the features of one step",
        lambda keras: keras.Sequential([keras.Input((6,)), keras.layers.Reshape((6, 1)), keras.layers.LSTM(UNITS)]),
        lengths=(6, 6),
    ),
]
Connect = Callable[[Any, Any, Any], Any]


def after_steps(name: str, connect: Connect, refused: str = "", *, more: bool = False, steps: int | None = None) -> Case:
    """Return the case of a function of `keras.layers`, `keras.ops` and the steps of a recurrent layer."""

    def build(keras: Any, x: Any) -> Any:
        return connect(keras.layers, keras.ops, keras.layers.GRU(4, return_sequences=True)(x))

    return Case(name, functional(build, steps=steps), refused, more)


def last_state_of_both(layers: Any, ops: Any, x: Any) -> Any:
    both = layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
    return layers.Dense(2)(ops.concatenate([both[:, -1, :3], both[:, 0, 3:]], axis=-1))


def flipped(layers: Any, ops: Any, x: Any) -> Any:
    """A forward layer, and a backward layer over reversed steps."""
    back = ops.flip(layers.LSTM(3, return_sequences=True)(ops.flip(x, axis=1)), axis=1)
    return ops.concatenate([layers.LSTM(3, return_sequences=True)(x), back], axis=-1)


def function(name: str, _: Any, ops: Any, x: Any) -> Any:
    return getattr(ops, name)(x)


CONNECTIONS: dict[str, Connect] = {
    "x[:, 0]": lambda _, __, x: x[:, 0],
    "x[:, ::-1]": lambda layers, _, x: layers.LSTM(3)(x[:, ::-1]),
    "first and last step of a bidirectional layer": last_state_of_both,
    "columns": lambda layers, ops, x: layers.LSTM(3)(ops.concatenate([x[..., 2:], x[:, :, :1], x[..., ::-1]], axis=2)),
    "Sum: over the steps": lambda _, ops, x: ops.sum(x, axis=1),
    "Mean: over the steps": lambda layers, ops, x: layers.Dense(2)(ops.mean(x, axis=1)),
    "Max: keepdims": lambda _, ops, x: ops.squeeze(ops.max(x, 1, keepdims=True), 1),
    "Flip: over the steps, and back": flipped,
    "Reshape, Squeeze, ExpandDims: of a vector": lambda layers, ops, x: layers.Dense(2)(
        ops.reshape(ops.squeeze(ops.expand_dims(x[:, -1], 1), axis=1), (-1, 4))
    ),
    "attention pool": lambda layers, ops, x: layers.Dense(2)(
        ops.sum(x * layers.Softmax(axis=1)(layers.Dense(1, use_bias=False)(x)), axis=1)
    ),
    "attention pool with a hidden layer": lambda layers, ops, x: ops.sum(
        layers.Multiply()([x, ops.softmax(layers.Dense(1, use_bias=False)(layers.Dense(3, activation="tanh")(x)), axis=1)]),
        axis=1,
    ),
    "attention pool by Dot": lambda layers, _, x: layers.Flatten()(
        layers.Dot(axes=1)([x, layers.Softmax(axis=1)(layers.Dense(1)(x))])
    ),
    "attention pool by Matmul": lambda layers, ops, x: ops.squeeze(
        ops.matmul(ops.transpose(x, (0, 2, 1)), ops.softmax(layers.Dense(1)(x), axis=1)), axis=-1
    ),
}
OPS = [
    *(after_steps(name, connect) for name, connect in CONNECTIONS.items()),
    after_steps("x[:, 1]", lambda _, __, x: x[:, 1], "takes the first or the last step"),
    after_steps("x[:, 1:]", lambda _, __, x: x[:, 1:], "takes the first or the last step", steps=6),
    after_steps("Sum: over the columns", lambda _, ops, x: ops.sum(x, axis=2), "a pool reduces the steps"),
    after_steps("keras.ops: cumsum", lambda _, ops, x: ops.cumsum(x, axis=1), "cannot be imported"),
    *(
        after_steps(f"keras.ops: {name}", partial(function, name), more=name not in ("silu", "exp"))
        for name in (*ACTIVATIONS[1:5], *ACTIVATIONS[7:11], "tanh", "gelu", "silu", "leaky_relu", "exp")
    ),
]


def _pools_joined(keras: Any, x: Any) -> Any:
    layers, y = keras.layers, keras.layers.LSTM(UNITS, return_sequences=True)(x)
    return layers.Dense(2)(layers.Concatenate()([layers.GlobalMaxPooling1D()(y), layers.GlobalAveragePooling1D()(y)]))


def _of_two_widths(keras: Any, x: Any) -> Any:
    return keras.layers.Concatenate()([conv(width, padding="same")(keras.layers)(x) for width in (1, 3)])


def _multiplied(keras: Any, x: Any) -> Any:
    return keras.layers.Multiply()([keras.layers.Conv1D(4, 3, padding="same")(x), cell("LSTM", **STEPS)(keras.layers)(x)])


def _trained(keras: Any, x: Any) -> Any:
    return keras.layers.GRU(2)(keras.layers.BatchNormalization()(x, training=True))


def _of_two_inputs(keras: Any) -> Any:
    starts = [keras.Input((None, 3)), keras.Input((None, 3))]
    return keras.Model(starts, keras.layers.GRU(2)(keras.layers.Add()(starts)))


def _twice(keras: Any, x: Any) -> Any:
    shared = keras.layers.Dense(FEATURES, activation="tanh")
    return keras.layers.GRU(UNITS)(shared(shared(x)))


def _nested(keras: Any, x: Any) -> Any:
    """A Sequential model, a functional model that is called twice, and a Sequential head."""
    layers, start = keras.layers, keras.Input((None, FEATURES))
    encoder = keras.Sequential([keras.Input((None, FEATURES)), layers.Dense(FEATURES, activation="relu")], name="encoder")
    inner = keras.Model(start, layers.Dense(FEATURES)(layers.Bidirectional(layers.GRU(3, return_sequences=True))(start)))
    head = keras.Sequential([keras.Input((UNITS,)), layers.Dense(3, activation="relu"), layers.Dense(2)], name="head")
    return head(layers.LSTM(UNITS)(inner(layers.LayerNormalization()(inner(encoder(x))))))


EVERY_KIND = (
    *(one("SpatialDropout1D", 0.1), conv(3, padding="same"), one("BatchNormalization"), both("LSTM", **STEPS), cell("GRU")),
    *(dense(4, "relu"), dense(2, "softmax")),
)
LAST: dict[str, tuple[Layer, ...]] = {
    "one logistic unit": (dense(1, "sigmoid"),),
    "several logistic units": (dense(3, "sigmoid"),),
    "one number": (dense(1),),
    "tanh": (dense(2, "tanh"),),
    "three layers": (dense(4, "relu"), one("Dropout", 0.5), dense(3, "tanh"), dense(2, "softmax")),
}
NETWORKS = [
    *(Case(f"last layers, {name}", over_ids(cell("LSTM"), *layers)) for name, layers in LAST.items()),
    Case("last layer over steps", over_ids(cell("LSTM", **STEPS), dense(3, "softmax"))),
    Case("mean of embeddings", over_ids(one("GlobalAveragePooling1D"), dense(4, "relu"), dense(2, "softmax"))),
    *(
        Case(f"models within a model, {suffix}", functional(_nested), suffix=suffix)
        for suffix in (".keras", ".h5", ".weights.h5")
    ),
    *(Case(f"every layer kind, {suffix}", over_ids(*EVERY_KIND), suffix=suffix) for suffix in (".h5", ".weights.h5")),
    Case("Concatenate: two pools of one layer", functional(_pools_joined)),
    Case("Concatenate: convolutions of several widths", functional(_of_two_widths)),
    Case("Average: both directions", functional(lambda keras, x: keras.layers.Average()(both("GRU", None)(keras.layers)(x)))),
    Case("Add: a number, and other arithmetic", functional(lambda keras, x: keras.layers.GRU(UNITS)(1.0 - (x * 0.5 + 2.0)))),
    Case("Dense: called twice", functional(_twice)),
    Case("two outputs", functional(lambda keras, x: [keras.layers.LSTM(2, name=name)(x) for name in ("first", "second")])),
    Case("Concatenate: along the steps", functional(lambda keras, x: keras.layers.Concatenate(axis=1)([x, x])), "Concatenate"),
    Case("Multiply: two layers", functional(_multiplied), "no layer of model.toml does in this way"),
    Case("BatchNormalization: training=True", functional(_trained), "is called with training=True"),
    Case("two inputs", _of_two_inputs, "has 2 inputs"),
]


def _own_layer(keras: Any) -> Any:
    class Doubled(keras.layers.Layer):  # type: ignore[misc]  # Keras is not installed here
        def call(self, x: Any) -> Any:
            return 2 * x

    return keras.Sequential([keras.Input((None, FEATURES)), Doubled(), keras.layers.GRU(2)])


def _own_model(keras: Any) -> Any:
    class Net(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.GRU(2)

        def call(self, x: Any) -> Any:
            return self.layer(x)

    model = Net()
    model.build((None, 5, FEATURES))
    return model


def _doubled(x: Any) -> Any:
    return 2 * x


def _quantized(keras: Any) -> Any:
    model = over_features(dense())(keras)
    model.quantize("int8")
    return model


CODE = [
    refuses("Lambda: any", "has Python code, which is not run", lambda layers: layers.Lambda(lambda x: 2 * x)),
    Case("Layer: a custom class", _own_layer, "is custom code, which is not run"),
    Case("Model: a custom class", _own_model, "whose computation is Python code"),
    refuses(
        "Dense: a function as its activation", "is the function _doubled, which is code", one("Dense", 2, activation=_doubled)
    ),
    Case("Dense: quantized", _quantized, "its option quantization_config"),
]
CASES = (*_convolutions(), *OF_STEPS, *OPS, *NETWORKS, *CODE)
