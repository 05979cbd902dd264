"""Writes the folder `checkpoints` with Keras 2: `python -m tests.importers.keras.make_keras2_checkpoints`.

It needs tf_keras 2.21.0 and tensorflow-cpu 2.21.0 in a separate environment, which is too large for every test run.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.importers.keras.builders import Case
from tests.importers.keras.keras2_cases import CASES, CUDNN, without_cudnn
from tests.importers.keras.make_checkpoints import randomize, samples

FOLDER = Path(__file__).resolve().parent / "checkpoints"


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
    if case.part not in CUDNN:
        return model
    plain = without_cudnn(case.part)(keras)
    plain.load_weights(file)
    return plain


if __name__ == "__main__":
    main()
