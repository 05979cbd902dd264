"""Convolutions, pools, and layers of single steps."""

from __future__ import annotations

from typing import Any

from tests.importers.keras.builders import STEPS, VOCABULARY, Case, Layer, cell, dense, functional, one, over_features, written

ACTIVATIONS = (
    *("linear", "relu", "relu6", "sigmoid", "hard_sigmoid", "tanh", "hard_tanh", "softplus", "softsign", "selu", "elu"),
    *("celu", "gelu", "silu", "leaky_relu", "exponential"),
)
WITHOUT = ("mish", "hard_silu", "log_sigmoid", "squareplus", "tanh_shrink", "soft_shrink")
"""Activations that a model does not have."""


def _conv(**options: Any) -> Layer:
    return one("Conv1D", **{"filters": 4, "kernel_size": 3, **options})


def _convolution_cases() -> list[Case]:
    windows: list[dict[str, Any]] = [
        *({"kernel_size": width, "padding": padding} for padding in ("valid", "same", "causal") for width in (1, 2, 3, 4)),
        *({"kernel_size": 3, "padding": padding, "strides": 2} for padding in ("valid", "same", "causal")),
        *({"kernel_size": 2, "padding": padding, "strides": 3} for padding in ("valid", "same")),
        *({"kernel_size": 3, "padding": padding, "dilation_rate": 2} for padding in ("valid", "same", "causal")),
    ]
    return [
        *(Case("Conv1D", written(window), over_features(_conv(**window))) for window in windows),
        Case("Conv1D", "groups=2", over_features(_conv(groups=2), features=4)),
        Case(
            "Conv1D",
            "groups=2, padding='same', strides=2",
            over_features(_conv(groups=2, padding="same", strides=2), features=4),
        ),
        Case("Conv1D", "use_bias=False", over_features(_conv(use_bias=False))),
        *(
            Case("Conv1D", f'activation "{name}"', over_features(_conv(activation=name)))
            for name in ("relu", "tanh", "gelu", "selu")
        ),
        Case("Conv1D", "batch norm and ReLU after it", over_features(_conv(), one("BatchNormalization"), one("ReLU"), _conv())),
        Case(
            "Conv1D",
            "data_format='channels_first'",
            over_features(_conv(data_format="channels_first"), steps=6),
            "data_format is 'channels_first'",
        ),
        Case("DepthwiseConv1D", "depth_multiplier=2", over_features(one("DepthwiseConv1D", kernel_size=3, depth_multiplier=2))),
        Case(
            "SeparableConv1D",
            "padding='same', activation",
            over_features(one("SeparableConv1D", filters=4, kernel_size=3, padding="same", activation="relu")),
        ),
        Case(
            "Conv1DTranspose",
            "any",
            over_features(one("Conv1DTranspose", filters=2, kernel_size=2)),
            "layers of this class cannot be imported",
        ),
    ]


def _text_cnn(keras: Any) -> Any:
    ids = keras.Input((None,), dtype="int32")
    layers = keras.layers
    x = layers.Embedding(VOCABULARY, 4)(ids)
    pools = [layers.GlobalMaxPooling1D()(layers.Conv1D(3, width, activation="relu")(x)) for width in (2, 3, 4)]
    return keras.Model(ids, layers.Dense(3, activation="softmax")(layers.Dropout(0.5)(layers.Concatenate()(pools))))


def _fixed_text_cnn(keras: Any) -> Any:
    ids = keras.Input((8,), dtype="int32")
    layers = keras.layers
    x = layers.Embedding(VOCABULARY, 4)(ids)
    pools = [
        layers.Flatten()(layers.MaxPooling1D(9 - width)(layers.Conv1D(3, width, activation="relu")(x))) for width in (2, 3)
    ]
    return keras.Model(ids, layers.Dense(3, activation="softmax")(layers.Concatenate()(pools)))


def _residual(layers: Any, x: Any) -> Any:
    for dilation in (1, 2):
        inner = layers.Conv1D(4, 2, padding="causal", dilation_rate=dilation, activation="relu")(x)
        inner = layers.Conv1D(4, 2, padding="causal", dilation_rate=dilation, activation="relu")(inner)
        x = layers.ReLU()(layers.Add()([inner, x if dilation > 1 else layers.Conv1D(4, 1)(x)]))
    return x


def _gated(layers: Any, x: Any) -> Any:
    y = layers.Conv1D(8, 2, padding="causal")(x)
    return layers.Activation("glu")(y)


POOLS = [
    *(
        Case(kind, written(window), over_features(one(kind, **window)))
        for kind in ("MaxPooling1D", "AveragePooling1D")
        for window in (
            {"pool_size": 2},
            {"pool_size": 3, "strides": 1, "padding": "same"},
            {"pool_size": 3, "strides": 2, "padding": "same"},
            {"pool_size": 3, "strides": 2},
        )
    ),
    Case(
        "MaxPooling1D",
        "all steps of a fixed number",
        over_features(one("MaxPooling1D", pool_size=6), one("Flatten"), dense(), steps=6),
        lengths=(6, 6),
    ),
    *(
        Case(kind, option, over_features(_conv(), one(kind, **options), *more))
        for kind in ("GlobalMaxPooling1D", "GlobalAveragePooling1D")
        for option, options, more in (
            ("as the output", {}, ()),
            ("below a dense layer", {}, (dense(),)),
            ("keepdims", {"keepdims": True}, (one("Flatten"),)),
        )
    ),
    Case("GlobalMaxPooling1D", "text CNN", _text_cnn),
    Case("MaxPooling1D", "text CNN of a fixed number of steps", _fixed_text_cnn, lengths=(8, 8)),
    Case("Add", "levels of a temporal convolutional network", functional(_residual)),
    Case("Activation", '"glu" after a convolution', functional(_gated)),
    Case("ZeroPadding1D", "before a convolution", over_features(one("ZeroPadding1D", padding=(2, 1)), _conv())),
    Case(
        "Cropping1D",
        "after a padded convolution",
        over_features(one("ZeroPadding1D", padding=2), _conv(), one("Cropping1D", cropping=(0, 2))),
    ),
    Case("UpSampling1D", "any", over_features(one("UpSampling1D")), "layers of this class cannot be imported"),
]


ACTIVATION_CASES = [
    *(Case("Dense", f'activation "{name}"', over_features(dense(4, name))) for name in ACTIVATIONS),
    *(
        Case("Activation", f'"{name}"', over_features(cell("GRU", **STEPS), one("Activation", activation=name)))
        for name in ACTIVATIONS
    ),
    *(
        Case("Activation", f'"{name}"', over_features(one("Activation", activation=name)), f"its activation is '{name}'")
        for name in WITHOUT
    ),
    *(
        Case(kind, written(options) or "defaults", over_features(dense(4), one(kind, **options)))
        for kind, choices in {
            "ReLU": ({}, {"max_value": 6.0}, {"negative_slope": 0.2}, {"threshold": 0.7}),
            "LeakyReLU": ({}, {"negative_slope": 0.05}),
            "ELU": ({}, {"alpha": 0.5}),
        }.items()
        for options in choices
    ),
    Case("ReLU", "max_value=2.0", over_features(one("ReLU", max_value=2.0)), "no activation of model.toml computes"),
    Case("PReLU", "one slope", over_features(dense(1), one("PReLU", shared_axes=[1]))),
    Case("PReLU", "a slope for each column", over_features(one("PReLU", shared_axes=[1])), "a slope for each column"),
    Case("Dense", "a layer as its activation", over_features(lambda layers: layers.Dense(4, activation=layers.LeakyReLU(0.1)))),
    Case("Dense", "use_bias=False", over_features(one("Dense", units=4, use_bias=False))),
    Case("Softmax", "last layer", over_features(dense(3), one("Softmax"))),
    Case("Softmax", "over the steps", over_features(one("Softmax", axis=1)), "only an attention pool with one score"),
]


def per_step(kind: str, **options: Any) -> Layer:
    return lambda layers: layers.TimeDistributed(getattr(layers, kind)(**options))


PER_STEP: dict[str, dict[str, Any]] = {
    "Dense": {"units": 4, "activation": "relu"},
    "Activation": {"activation": "tanh"},
    "LayerNormalization": {},
    "Dropout": {"rate": 0.5},
}
SINGLE_STEPS = [
    *(
        Case(
            "TimeDistributed",
            kind,
            over_features(
                cell("LSTM", **STEPS),
                per_step(kind, **options),
            ),
        )
        for kind, options in PER_STEP.items()
    ),
    Case(
        "TimeDistributed",
        "LSTM",
        over_features(one("Reshape", target_shape=(5, 3, 1)), per_step("LSTM", units=2), steps=5),
        "it applies LSTM",
    ),
    *(
        Case(
            "BatchNormalization",
            written(options) or "defaults",
            over_features(cell("GRU", **STEPS), one("BatchNormalization", **options)),
        )
        for options in ({}, {"scale": False}, {"center": False}, {"epsilon": 0.1})
    ),
    Case(
        "BatchNormalization",
        "after a pool",
        over_features(_conv(), one("GlobalMaxPooling1D"), one("BatchNormalization"), dense()),
    ),
    Case(
        "BatchNormalization", "over the steps", over_features(one("BatchNormalization", axis=1), steps=5), "only the last axis"
    ),
    *(
        Case(
            "LayerNormalization",
            written(options) or "defaults",
            over_features(one("LayerNormalization", **options), cell("GRU")),
        )
        for options in ({}, {"scale": False}, {"center": False}, {"epsilon": 1e-5})
    ),
    Case(
        "LayerNormalization",
        "over two axes",
        over_features(one("LayerNormalization", axis=[1, 2]), steps=5),
        "only the last axis",
    ),
    Case("Rescaling", "scale and offset", over_features(one("Rescaling", scale=0.5, offset=1.0), cell("GRU"))),
    Case("Normalization", "adapted", over_features(one("Normalization"), cell("GRU"))),
    *(
        Case(kind, "before and after a layer", over_features(one(kind, **options), cell("GRU", **STEPS), one(kind, **options)))
        for kind, options in {
            "Dropout": {"rate": 0.5},
            "SpatialDropout1D": {"rate": 0.5},
            "GaussianNoise": {"stddev": 0.5},
            "GaussianDropout": {"rate": 0.5},
            "AlphaDropout": {"rate": 0.5},
            "ActivityRegularization": {"l2": 0.5},
            "Identity": {},
        }.items()
    ),
]


CASES = (*_convolution_cases(), *POOLS, *ACTIVATION_CASES, *SINGLE_STEPS)
