"""Runs a model in Keras 3 itself, if it is installed, to compare an imported model with it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from service.importers.draft import Array, Original
from service.importers.keras.architecture import is_of_keras
from service.importers.keras.call import KerasReading
from service.importers.keras.files import Saved

CODE = ("function", "Lambda", "__lambda__", "__typespec__")
"""Classes in an architecture that stand for code."""
UNREAD = "compile_config"
"""A key of the architecture that Keras does not read if it does not compile the model."""


def original(path: Path, model: Saved, reading: KerasReading) -> Original | None:
    """Return the model as Keras 3 runs it, or None if that is not installed, or if the model may have code or is of Keras 2."""
    if model.is_keras_2 or not _has_only_keras(model.architecture):
        return None
    try:
        keras = import_module("keras")
    except Exception:  # the package is missing, or its backend, which raises its own exceptions
        return None
    if not keras.__version__.startswith("3."):
        return None
    loaded: list[Any] = []
    architecture = None if model.is_whole else model.architecture

    def run(row: Array) -> Array:
        if reading.lengths and not row.all():
            raise ValueError("Keras skips steps of zeros")
        if not loaded:
            loaded.append(_loaded(keras, path, architecture))
        for layer in loaded[0].layers:
            if getattr(layer, "stateful", False):
                layer.reset_states()
        output = loaded[0](row[None], training=False)
        first = output[0] if isinstance(output, list | tuple) else output
        batch: Array = np.asarray(keras.ops.convert_to_numpy(first))
        return np.asarray(batch[0])

    return Original(f"Keras {keras.__version__}", run, reading.steps if reading.fixed else None)


def _loaded(keras: Any, path: Path, architecture: Any) -> Any:
    """Return a model of Keras. architecture: for a file with weights only, or None."""
    if architecture is None:
        return keras.models.load_model(path, compile=False, safe_mode=True)
    built = keras.models.model_from_json(json.dumps(architecture))
    built.load_weights(path)
    return built


def _has_only_keras(architecture: Any) -> bool:
    """Whether every class in an architecture is of Keras itself, so that loading it runs no other code."""
    waiting = [architecture]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            module = item.get("module")
            is_other = isinstance(module, str) and not is_of_keras(module)
            if is_other or item.get("class_name") in CODE or ">" in str(item.get("registered_name")):
                return False
            waiting += [value for key, value in item.items() if key != UNREAD]
    return True
