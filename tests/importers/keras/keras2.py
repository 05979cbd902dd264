"""Models of Keras 2. `python -m tests.importers.keras.keras2` wrote their checkpoints into the folder `checkpoints`.

That needs tf_keras 2.21.0 and tensorflow-cpu 2.21.0 in a separate environment, which is too large for every test run.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

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
from tests.importers.keras.make_checkpoints import randomize, samples

FOLDER = Path(__file__).resolve().parent / "checkpoints"
CUDNN: dict[str, tuple[str, dict[str, Any]]] = {"CuDNNLSTM": ("LSTM", {}), "CuDNNGRU": ("GRU", {"reset_after": True})}
"""The layers that compute the same without cuDNN, with their options."""
HARD: dict[str, Any] = {"recurrent_activation": "hard_sigmoid"}


def _functional(keras: Any, ids: Any) -> Any:
    """A model within a model, a shared layer, and layers with several outputs."""
    layers = keras.layers
    x = layers.Embedding(VOCABULARY, FEATURES, mask_zero=True)(ids)
    shared = layers.Dense(FEATURES, activation="tanh")
    steps = layers.Bidirectional(layers.GRU(3, return_sequences=True, return_state=True))(shared(shared(x)))[0]
    last = layers.LSTM(UNITS, return_state=True)(layers.TimeDistributed(layers.Dense(4, activation="relu"))(steps))[1]
    head = keras.Sequential([keras.Input((UNITS,)), layers.Dense(3), layers.LeakyReLU(), layers.Dense(2, activation="softmax")])
    return head(layers.BatchNormalization()(last))


def _text_cnn(keras: Any, ids: Any) -> Any:
    layers = keras.layers
    x = layers.SpatialDropout1D(0.1)(layers.Embedding(VOCABULARY, 4)(ids))
    pools = [layers.GlobalMaxPooling1D()(layers.Conv1D(3, width, activation="relu")(x)) for width in (2, 3)]
    return layers.Dense(2, activation="hard_sigmoid")(layers.concatenate(pools))


def _operations(keras: Any, start: Any) -> Any:
    """Functions of TensorFlow between layers: arithmetic, an attention pool, the last step, and the first columns."""
    layers = keras.layers
    x = layers.GRU(UNITS, return_sequences=True)(1.0 - start * 0.5)
    attended = keras.backend.sum(x * layers.Softmax(axis=1)(layers.Dense(1)(x)), axis=1)
    return layers.Dense(2)(keras.backend.concatenate([attended, x[:, -1, :], x[:, -1][..., :2]], axis=-1))


def _without_input_layer(keras: Any) -> Any:
    """A Sequential model with the shape of the input in its first layer."""
    return keras.Sequential(
        [
            keras.layers.Embedding(VOCABULARY, FEATURES, input_length=6),
            keras.layers.Bidirectional(keras.layers.SimpleRNN(UNITS, activation="relu"), merge_mode="ave"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def cudnn(kind: str, **options: Any) -> Any:
    return over_features(both(kind, **STEPS, **options), cell(kind, **options), dense(), features=2)


CASES: dict[str, Case] = {
    "hard_sigmoid.h5": Case(
        "LSTM, GRU",
        over_ids(both("LSTM", **HARD, **STEPS), cell("GRU", reset_after=False, **HARD), mask_zero=True),
        padding="pre",
    ),
    "hard_sigmoid.keras": Case("GRU", over_features(cell("GRU", **HARD), dense())),
    "functional.h5": Case("Functional", functional(_functional, ids=True), padding="post"),
    "functional.keras": Case("Functional", functional(_functional, ids=True), padding="post"),
    "weights_only.h5": Case(
        "weights only",
        over_features(one("Masking"), cell("LSTM", **STEPS), one("LayerNormalization"), dense()),
    ),
    "text_cnn.h5": Case("text CNN", functional(_text_cnn, ids=True)),
    "input_length.h5": Case("a fixed number of steps", _without_input_layer, lengths=(6, 6)),
    "cudnn_lstm.h5": Case("CuDNNLSTM", cudnn("CuDNNLSTM")),
    "cudnn_gru.h5": Case("CuDNNGRU", cudnn("CuDNNGRU")),
    "operations.h5": Case("arithmetic, attention pool, last step", functional(_operations)),
}
"""Models by the name of the file."""


def main() -> None:
    warnings.simplefilter("ignore")
    keras = import_module("tf_keras")
    legacy = import_module("tensorflow").compat.v1.keras.layers
    for kind in CUDNN:
        setattr(keras.layers, kind, getattr(legacy, kind))
    FOLDER.mkdir(exist_ok=True)
    for index, (name, case) in enumerate(CASES.items()):
        keras.utils.set_random_seed(index)
        keras.backend.clear_session()
        model = case.build(keras)
        randomize(model, index)
        save(model, FOLDER / name)
        np.savez(FOLDER / f"{name}.npz", **samples(runnable(keras, model, case, FOLDER / name), case))


def save(model: Any, file: Path) -> None:
    if file.name.startswith("weights_only"):
        model.save_weights(file)
        file.with_suffix(".json").write_text(model.to_json())
    else:
        model.save(file)


def runnable(keras: Any, model: Any, case: Case, file: Path) -> Any:
    """Return the model, or an equal model without CuDNN layers, into which Keras loads the weights of the file."""
    if case.name not in CUDNN:
        return model
    plain_kind, options = CUDNN[case.name]
    plain = cudnn(plain_kind, **options)(keras)
    plain.load_weights(file)
    return plain


if __name__ == "__main__":
    main()
