"""Builds every tested model with random weights, and saves it with inputs and with the outputs that Keras computes.

Runs in a separate environment: `python -m tests.importers.keras.make_checkpoints FOLDER [more]`. Knows nothing of the service.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.importers.keras import layer_cases, recurrent_cases
from tests.importers.keras.builders import VOCABULARY, Case

Array = Any
CASES: Sequence[Case] = (*recurrent_cases.CASES, *layer_cases.CASES)


def main(folder: Path, *, more: bool) -> None:
    """Write the models of make test, or with `more` the models of tests/long."""
    os.environ.setdefault("KERAS_BACKEND", "numpy")
    warnings.simplefilter("ignore")
    keras = import_module("keras")

    for index, case in enumerate(CASES):
        if case.more != more:
            continue
        keras.utils.set_random_seed(index)
        keras.backend.clear_session(free_memory=False)  # collecting garbage would take most of the time
        model = case.build(keras)
        randomize(model, index)
        save(model, folder / f"{index}{case.suffix}")
        if not case.refused:
            np.savez(folder / f"{index}.npz", **samples(model, case))


def randomize(model: Any, seed: int) -> None:
    """Give every weight a random value, so that none is zero or one by default."""
    random = np.random.default_rng(seed)
    for variable in model.variables:
        if np.issubdtype(np.asarray(variable).dtype, np.floating):
            values = random.normal(size=variable.shape) * 0.5
            is_spread = variable.name.partition(":")[0].endswith("variance")
            variable.assign(np.abs(values) + 0.5 if is_spread else values)
    for layer in model.layers:
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()  # Normalization keeps values that it computed from its statistics


def save(model: Any, file: Path) -> None:
    """Save a model as its users do; for weights alone, save the JSON of the model as well."""
    if file.name.endswith(".weights.h5"):
        model.save_weights(file)
        file.with_name(f"{file.name.removesuffix('.weights.h5')}.json").write_text(json.dumps(json.loads(model.to_json())))
    else:
        model.save(file)


def samples(model: Any, case: Case) -> dict[str, Array]:
    """Return random sequences, packed end to end, and the first output of the model for each."""
    random = np.random.default_rng(1)
    ids = any(type(layer).__name__ == "Embedding" for layer in model.layers)
    shape = (len(model.input_shape) - 2) * (model.input_shape[-1],)
    rows = [
        random.integers(1, VOCABULARY, size=length, dtype=np.int32)
        if ids
        else random.normal(size=(length, *shape)).astype(np.float32)
        for length in case.lengths
    ]
    outputs = padded_outputs(model, rows, case.padding) if case.padding else [answer(model, row[None])[0] for row in rows]
    has_steps = len(model.outputs[0].shape) == 3
    joined = np.concatenate(rows)
    return {
        "ids" if ids else "inputs": joined if ids or shape else joined[:, None],
        "offsets": np.cumsum([0, *case.lengths]),
        "output": np.concatenate(outputs) if has_steps else np.stack(outputs),
    }


def padded_outputs(model: Any, rows: Sequence[Array], padding: str) -> list[Array]:
    """Return the answers of a model for a batch with padding, without the steps of the padding."""
    steps = max(map(len, rows)) + 2
    batch = np.zeros((len(rows), steps, *rows[0].shape[1:]), rows[0].dtype)
    places = [place(len(row), steps, padding) for row in rows]
    for index, row in enumerate(rows):
        batch[index, places[index]] = row
    output = answer(model, batch)
    return [output[index, places[index]] if output.ndim == 3 else output[index] for index in range(len(rows))]


def place(length: int, steps: int, padding: str) -> Array:
    """Return the steps of a sequence in a padded sequence."""
    if padding == "holes":
        return np.sort(np.random.default_rng(length).permutation(steps)[:length])
    return np.arange(length) + (steps - length if padding == "pre" else 0)


def answer(model: Any, batch: Array) -> Array:
    for layer in model.layers:
        if getattr(layer, "stateful", False):
            layer.reset_states()
    output = model(batch)
    return np.asarray(output[0] if isinstance(output, list | tuple) else output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), more=len(sys.argv) > 2)
