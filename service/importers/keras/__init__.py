"""Imports models of Keras 2 and Keras 3: .keras, .weights.h5 and .h5. h5py reads the files, and Keras is not needed.

`files` opens a file with `service.importers.hdf5`, `architecture` reads the layers and their calls, `weights` finds the tensors of a
layer, and `graph` calls the layers with operations of `service.importers.chain`. `original` runs the source where Keras is installed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from service.importers.chain.finishing import finished
from service.importers.draft import Draft, ImportRefused, named_in_refusals
from service.importers.keras.architecture import Network, network
from service.importers.keras.call import KerasReading, KerasTensor
from service.importers.keras.files import saved
from service.importers.keras.graph import run, start
from service.importers.keras.original import original
from service.importers.keras.weights import WeightsFile


def read(path: Path) -> Draft:
    """Return the model in a file of Keras; raises ImportRefused if model.toml cannot express it."""
    # Damaged weights overflow, and are refused below.
    with saved(path) as model, np.errstate(all="ignore"), named_in_refusals(path):
        architecture = network(model.architecture)
        reading = KerasReading(
            file=WeightsFile(model.weights),
            is_keras_2=model.is_keras_2,
            takes_ids=_has_embedding(architecture),
            notes=list(model.notes),
        )
        output = run(architecture, [start(architecture, reading)], reading.file.of(architecture), reading)
        if not isinstance(output, KerasTensor):
            raise ImportRefused("the first output of the model is a cell state or a mask, and no output of a layer")
        draft = finished(output.signal, f"Keras {2 if model.is_keras_2 else 3}")
        outputs = [one.layer for one in architecture.outputs]
        reading.complete(draft, reading.file.unused, "source", outputs, marks="mask")
        draft.original = original(path, model, reading)
    return draft


def _has_embedding(architecture: Network) -> bool:
    layers = architecture.layers.values()
    return any(layer.kind == "Embedding" or (layer.network is not None and _has_embedding(layer.network)) for layer in layers)
