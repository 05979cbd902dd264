"""Loads exported .h5 files with Keras, and saves its outputs for the rows next to each file.

Runs in its own environment: `python -m tests.exporters.run_keras FOLDER`. Knows nothing of the service.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np


def main(folder: Path) -> None:
    os.environ["KERAS_BACKEND"] = "numpy"
    warnings.simplefilter("ignore")
    keras = import_module("keras")
    for file in sorted(folder.glob("*.h5")):
        keras.backend.clear_session()
        model = keras.models.load_model(file)
        with np.load(file.with_suffix(".rows.npz")) as rows:
            answers = {name: np.asarray(model(row[None], training=False))[0] for name, row in rows.items()}
        np.savez(file.with_suffix(".answers.npz"), **answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
