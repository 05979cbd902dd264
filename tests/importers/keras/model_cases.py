"""Whole models: masks, tensors that are joined, heads, models within models, and code."""

from __future__ import annotations

from typing import Any

from tests.importers.keras.builders import (
    FEATURES,
    STEPS,
    UNITS,
    VOCABULARY,
    Case,
    both,
    cell,
    dense,
    functional,
    one,
    over_features,
    over_ids,
)


def _explicit_mask(keras: Any) -> Any:
    ids = keras.Input((None,), dtype="int32")
    mask = keras.ops.not_equal(ids, 0)
    x = keras.layers.Embedding(VOCABULARY, FEATURES)(ids)
    return keras.Model(ids, keras.layers.LSTM(UNITS)(x, mask=mask))


def _masked_functional(keras: Any) -> Any:
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, FEATURES, mask_zero=True)(ids)
    x = keras.layers.Bidirectional(keras.layers.GRU(UNITS, return_sequences=True))(x)
    x = keras.layers.TimeDistributed(keras.layers.Dense(3, activation="relu"))(keras.layers.Dropout(0.5)(x))
    return keras.Model(ids, keras.layers.Dense(2, activation="softmax")(keras.layers.LSTM(UNITS)(x)))


def _masked_sum(keras: Any) -> Any:
    start = keras.Input((None, FEATURES))
    x = keras.layers.Masking()(start)
    forward, backward = keras.layers.GRU(UNITS)(x), keras.layers.GRU(UNITS, go_backwards=True)(x)
    return keras.Model(start, keras.layers.Dense(1)(keras.layers.Concatenate()([forward, backward])))


MASKS = [
    *(
        Case("Embedding", f'mask_zero, {kind}, padding "{padding}"', over_ids(cell(kind), mask_zero=True), padding=padding)
        for kind in ("LSTM", "GRU", "SimpleRNN")
        for padding in ("post", "pre", "holes")
    ),
    *(
        Case("Embedding", f'mask_zero, {name}, padding "{padding}"', over_ids(*layers, mask_zero=True), padding=padding)
        for name, layers in (
            ("return_sequences", (cell("GRU", **STEPS),)),
            ("both directions, return_sequences", (both("LSTM", **STEPS),)),
            ("two bidirectional layers", (both("LSTM", **STEPS), both("GRU"))),
            ("go_backwards", (cell("GRU", go_backwards=True),)),
            ("mean over time", (cell("GRU", **STEPS), one("GlobalAveragePooling1D"))),
            ("tags", (both("LSTM", **STEPS), dense(3, "softmax"))),
        )
        for padding in ("post", "pre")
    ),
    Case("Embedding", "mask_zero in a functional model", _masked_functional, padding="pre"),
    Case(
        "Embedding",
        "mask_zero and a maximum over time, sequences without padding",
        over_ids(cell("GRU", **STEPS), one("GlobalMaxPooling1D"), mask_zero=True),
    ),
    Case(
        "Embedding",
        "mask_zero and a convolution, sequences without padding",
        over_ids(one("Conv1D", filters=4, kernel_size=3), one("GlobalMaxPooling1D"), mask_zero=True),
    ),
    Case("Masking", 'padding "post"', over_features(one("Masking"), cell("LSTM"), dense()), padding="post"),
    Case("Masking", 'padding "pre"', over_features(one("Masking"), both("GRU", **STEPS), dense()), padding="pre"),
    Case("Masking", "separate forward and backward layers", _masked_sum, padding="post"),
    Case("NotEqual", "a mask as an argument", _explicit_mask, padding="post"),
]


def _pools_joined(layers: Any, x: Any) -> Any:
    y = layers.LSTM(UNITS, return_sequences=True)(x)
    return layers.Dense(2)(layers.Concatenate()([layers.GlobalMaxPooling1D()(y), layers.GlobalAveragePooling1D()(y)]))


def _convolutions_joined(layers: Any, x: Any) -> Any:
    return layers.Concatenate()([layers.Conv1D(3, width, padding="same")(x) for width in (1, 3, 5)])


def _multiplied(layers: Any, x: Any) -> Any:
    return layers.Multiply()([layers.Conv1D(4, 3, padding="same")(x), layers.LSTM(4, return_sequences=True)(x)])


def _averaged(layers: Any, x: Any) -> Any:
    forward, backward = both("GRU", None)(layers)(x)
    return layers.Average()([forward, backward])


def _training(layers: Any, x: Any) -> Any:
    return layers.GRU(2)(layers.BatchNormalization()(x, training=True))


def _twice(layers: Any, x: Any) -> Any:
    shared = layers.Dense(FEATURES, activation="tanh")
    return layers.GRU(UNITS)(shared(shared(x)))


MERGES = [
    Case("Concatenate", "two pools of one layer", functional(_pools_joined)),
    Case("Concatenate", "convolutions of several widths", functional(_convolutions_joined)),
    Case(
        "Concatenate",
        "along the steps",
        functional(lambda layers, x: layers.Concatenate(axis=1)([x, layers.Dense(FEATURES)(x)])),
        "Concatenate",
    ),
    Case("Average", "both directions", functional(_averaged)),
    Case("Multiply", "two layers", functional(_multiplied), "no layer of model.toml does in this way"),
    Case("Add", "a number, and other arithmetic", functional(lambda layers, x: layers.GRU(UNITS)(1.0 - (x * 0.5 + 2.0)))),
    Case("Dense", "called twice", functional(_twice)),
    Case("BatchNormalization", "training=True", functional(_training), "is called with training=True"),
    Case("Flatten", "all steps", over_features(one("Flatten"), steps=5), "a model takes sequences of any length"),
    Case(
        "Reshape",
        "one column for each number",
        lambda keras: keras.Sequential([keras.Input((6,)), keras.layers.Reshape((6, 1)), keras.layers.LSTM(UNITS)]),
        lengths=(6, 6),
    ),
    Case(
        "Reshape", "of the steps", over_features(one("Reshape", target_shape=(3, 6)), steps=6), "makes one axis of 3 of steps"
    ),
    Case(
        "Permute",
        "steps and features",
        over_features(one("Permute", dims=(2, 1)), cell("GRU"), steps=5),
        "and not batch, steps, columns",
    ),
]

HEADS = [
    *(
        Case("Dense", f"last layer, {name}", over_ids(cell("LSTM"), dense(units, activation)))
        for name, units, activation in (
            ("softmax of labels", 3, "softmax"),
            ("one logistic unit", 1, "sigmoid"),
            ("several logistic units", 3, "sigmoid"),
            ("one number", 1, None),
            ("several numbers", 3, None),
            ("tanh", 2, "tanh"),
        )
    ),
    *(
        Case("Dense", f"last layer over steps, {name}", over_ids(cell("LSTM", **STEPS), dense(units, activation)))
        for name, units, activation in (("softmax of labels", 3, "softmax"), ("several numbers", 3, None))
    ),
    Case(
        "Dense",
        "three layers after a pool",
        over_ids(both("GRU"), dense(4, "relu"), one("Dropout", rate=0.5), dense(3, "tanh"), dense(2, "softmax")),
    ),
    Case("Embedding", "mean of embeddings", over_ids(one("GlobalAveragePooling1D"), dense(4, "relu"), dense(2, "softmax"))),
]


def _nested(keras: Any) -> Any:
    layers = keras.layers
    encoder = keras.Sequential(
        [keras.Input((None, FEATURES)), layers.Dense(4, activation="relu"), layers.LSTM(UNITS)], name="encoder"
    )
    start = keras.Input((None, FEATURES))
    head = keras.Sequential(
        [keras.Input((UNITS,)), layers.Dense(3, activation="relu"), layers.Dense(2, activation="softmax")], name="head"
    )
    return keras.Model(start, head(encoder(start)))


def _nested_functional(keras: Any) -> Any:
    layers = keras.layers
    start, outer = keras.Input((None, FEATURES)), keras.Input((None, FEATURES))
    inner = keras.Model(start, layers.Dense(FEATURES)(layers.Bidirectional(layers.GRU(3, return_sequences=True))(start)))
    return keras.Model(outer, layers.LSTM(UNITS)(inner(layers.LayerNormalization()(inner(outer)))))


def _two_outputs(layers: Any, x: Any) -> Any:
    y = layers.LSTM(UNITS)(x)
    return [layers.Dense(2, name="first")(y), layers.Dense(3, name="second")(y)]


NETWORKS = [
    *(
        Case("Sequential" if build is _nested else "Functional", f"{option}, {suffix}", build, suffix=suffix)
        for build, option in (
            (_nested, "two within a functional model"),
            (_nested_functional, "within a functional model, called twice"),
        )
        for suffix in (".keras", ".h5", ".weights.h5")
    ),
    *(
        Case(
            "Sequential",
            f"every layer kind, {suffix}",
            over_ids(
                one("SpatialDropout1D", rate=0.1),
                one("Conv1D", filters=4, kernel_size=3, padding="same"),
                one("BatchNormalization"),
                both("LSTM", **STEPS),
                cell("GRU"),
                dense(4, "relu"),
                dense(2, "softmax"),
            ),
            suffix=suffix,
        )
        for suffix in (".h5", ".weights.h5")
    ),
    Case("Embedding", "mask_zero in a functional model, .h5", _masked_functional, padding="post", suffix=".h5"),
    Case("Functional", "two outputs", functional(_two_outputs)),
    Case(
        "Functional",
        "two inputs",
        lambda keras: keras.Model(
            starts := [keras.Input((None, 3)), keras.Input((None, 3))], keras.layers.GRU(2)(keras.layers.Add()(starts))
        ),
        "has 2 inputs",
    ),
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


def _own_activation(keras: Any) -> Any:
    def doubled(x: Any) -> Any:
        return 2 * x

    return keras.Sequential([keras.Input((None, FEATURES)), keras.layers.Dense(2, activation=doubled)])


def _quantized(keras: Any) -> Any:
    model = over_features(dense())(keras)
    model.quantize("int8")
    return model


CODE = [
    Case("Lambda", "any", over_features(lambda layers: layers.Lambda(lambda x: 2 * x)), "has Python code, which is not run"),
    Case("Layer", "a custom class", _own_layer, "is custom code, which is not run"),
    Case("Model", "a custom class", _own_model, "whose computation is Python code"),
    Case("Dense", "a function as its activation", _own_activation, "is the function doubled, which is code"),
    Case("Dense", "quantized", _quantized, "its option quantization_config"),
    Case(
        "MultiHeadAttention",
        "any",
        functional(lambda layers, x: layers.MultiHeadAttention(1, 2)(x, x)),
        "layers of this class cannot be imported",
    ),
]


CASES = (*MASKS, *MERGES, *HEADS, *NETWORKS, *CODE)
