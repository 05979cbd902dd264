"""Models of Keras 2. `make_keras2_checkpoints` wrote their checkpoints into the folder `checkpoints`. Loads no Keras."""

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
    one,
    over_features,
    over_ids,
)

CUDNN: dict[str, tuple[str, dict[str, Any]]] = {"CuDNNLSTM": ("LSTM", {}), "CuDNNGRU": ("GRU", {"reset_after": True})}
"""The layers that compute the same without cuDNN, with their options."""
HARD: dict[str, Any] = {"recurrent_activation": "hard_sigmoid"}


def _functional(keras: Any) -> Any:
    """A model within a model, a shared layer, and layers with several outputs."""
    layers = keras.layers
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, FEATURES, mask_zero=True)(ids)
    shared = layers.Dense(FEATURES, activation="tanh")
    steps = layers.Bidirectional(layers.GRU(3, return_sequences=True, return_state=True))(shared(shared(x)))[0]
    last = layers.LSTM(UNITS, return_state=True)(layers.TimeDistributed(layers.Dense(4, activation="relu"))(steps))[1]
    head = keras.Sequential([keras.Input((UNITS,)), layers.Dense(3), layers.LeakyReLU(), layers.Dense(2, activation="softmax")])
    return keras.Model(ids, head(layers.BatchNormalization()(last)))


def _text_cnn(keras: Any) -> Any:
    layers = keras.layers
    ids = keras.Input((None,), dtype="int32")
    x = layers.SpatialDropout1D(0.1)(layers.Embedding(VOCABULARY, 4)(ids))
    pools = [layers.GlobalMaxPooling1D()(layers.Conv1D(3, width, activation="relu")(x)) for width in (2, 3)]
    return keras.Model(ids, layers.Dense(2, activation="hard_sigmoid")(layers.concatenate(pools)))


def _operations(keras: Any) -> Any:
    """Functions of TensorFlow between layers: arithmetic, an attention pool, the last step, and the first columns."""
    layers, start = keras.layers, keras.Input((None, FEATURES))
    x = layers.GRU(UNITS, return_sequences=True)(1.0 - start * 0.5)
    attended = keras.backend.sum(x * layers.Softmax(axis=1)(layers.Dense(1)(x)), axis=1)
    return keras.Model(start, layers.Dense(2)(keras.backend.concatenate([attended, x[:, -1, :], x[:, -1][..., :2]], axis=-1)))


def _without_input_layer(keras: Any) -> Any:
    """A Sequential model with the shape of the input in its first layer."""
    return keras.Sequential(
        [
            keras.layers.Embedding(VOCABULARY, FEATURES, input_length=6),
            keras.layers.Bidirectional(keras.layers.SimpleRNN(UNITS, activation="relu"), merge_mode="ave"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def _cudnn(kind: str) -> Any:
    return over_features(both(kind, **STEPS), cell(kind), dense(), features=2)


CASES: dict[str, Case] = {
    "hard_sigmoid.h5": Case(
        "LSTM, GRU",
        "Keras 2, hard_sigmoid, .h5",
        over_ids(both("LSTM", **HARD, **STEPS), cell("GRU", reset_after=False, **HARD), mask_zero=True),
        padding="pre",
    ),
    "hard_sigmoid.keras": Case("GRU", "Keras 2, hard_sigmoid, .keras", over_features(cell("GRU", **HARD), dense())),
    "functional.h5": Case("Functional", "Keras 2, .h5", _functional, padding="post"),
    "functional.keras": Case("Functional", "Keras 2, .keras", _functional, padding="post"),
    "weights_only.h5": Case(
        "Sequential",
        "Keras 2, .h5 of weights only",
        over_features(one("Masking"), cell("LSTM", **STEPS), one("LayerNormalization"), dense()),
    ),
    "text_cnn.h5": Case("Conv1D", "Keras 2, text CNN", _text_cnn),
    "input_length.h5": Case("Sequential", "Keras 2, a fixed number of steps", _without_input_layer, lengths=(6, 6)),
    "cudnn_lstm.h5": Case("CuDNNLSTM", "one direction and both", _cudnn("CuDNNLSTM")),
    "cudnn_gru.h5": Case("CuDNNGRU", "one direction and both", _cudnn("CuDNNGRU")),
    "operations.h5": Case("TFOpLambda, SlicingOpLambda", "Keras 2, arithmetic, attention pool, last step", _operations),
}
"""Models by the name of the file."""


def without_cudnn(kind: str) -> Any:
    """Return the model that computes the same as a model of CuDNN layers, on any processor."""
    plain, options = CUDNN[kind]
    return over_features(both(plain, **STEPS, **options), cell(plain, **options), dense(), features=2)
