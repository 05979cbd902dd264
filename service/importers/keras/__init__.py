"""Imports models of Keras 2 and Keras 3: .keras, .weights.h5 and .h5. h5py reads the files, and Keras is not needed.

`files` opens a file with `service.importers.hdf5`, `architecture` reads the layers and their calls, `weights` finds the tensors of a
layer, and `graph` calls the layers with operations of `service.importers.chain`. `original` runs the source where Keras is installed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from service.importers.chain.finishing import finished
from service.importers.chain.nodes import Input
from service.importers.draft import Draft, ImportRefused
from service.importers.keras.architecture import Network, network
from service.importers.keras.call import KerasReading, KerasTensor
from service.importers.keras.files import saved
from service.importers.keras.graph import run, start
from service.importers.keras.original import original
from service.importers.keras.weights import WeightsFile


def read(path: Path) -> Draft:
    """Return the model in a file of Keras; raises ImportRefused if model.toml cannot express it."""
    with saved(path) as model, np.errstate(all="ignore"):  # damaged weights overflow, and are refused below
        try:
            architecture = network(model.architecture)
            ids = Input(1, is_ids=True) if _has_embedding(architecture) else None
            reading = KerasReading(WeightsFile(model.weights), model.is_keras_2, ids, list(model.notes))
            output = run(architecture, [start(architecture, reading)], reading.file.of(architecture), reading)
            if not isinstance(output, KerasTensor):
                raise ImportRefused("the first output of the model is a cell state or a mask, and no output of a layer")
            draft = finished(output.signal, f"Keras {2 if model.is_keras_2 else 3}")
        except ImportRefused as refused:
            raise ImportRefused(f"{path}: {refused}") from refused
        _complete(draft, architecture, reading)
        draft.original = original(path, model, reading)
    return draft


def _complete(draft: Draft, architecture: Network, reading: KerasReading) -> None:
    """Add the results of calling the layers: notes and unused tensors."""
    draft.unused = reading.file.unused
    draft.notes += reading.notes
    if reading.fixed_steps is not None:
        draft.input["max_steps"] = reading.fixed_steps
        draft.notes.append(
            f"the source takes sequences of {reading.fixed_steps} steps only, and the model sequences of any length"
        )
    if not reading.has_mask:
        draft.notes.append("the source has no mask: if it was trained with padding, padded steps counted as steps")
    if len(architecture.outputs) > 1:
        others = ", ".join(one.layer for one in architecture.outputs[1:])
        draft.notes.append(f"of the outputs, only {architecture.outputs[0].layer} is imported, without {others}")


def _has_embedding(architecture: Network) -> bool:
    layers = architecture.layers.values()
    return any(layer.kind == "Embedding" or (layer.network is not None and _has_embedding(layer.network)) for layer in layers)
