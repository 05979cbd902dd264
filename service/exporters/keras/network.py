"""A functional model of Keras in the making, and the legacy .h5 file that Keras saves."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py

from service.importers.draft import Array

VERSION = "3.0.0"
"""The first version of Keras that has layers as they are written here."""
FLOAT, INTEGER = "float32", "int32"
Shape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An output of a layer. shape: with the batch."""

    layer: str
    output: int
    shape: Shape

    @property
    def width(self) -> int:
        size = self.shape[-1]
        assert size is not None, "the last axis has a fixed size"
        return size


class Network:
    """Layers in the order in which Keras reads their weights: of two at one depth, the first input of the layer above them first."""

    def __init__(self, features: int | None) -> None:
        shape: Shape = (None, None) if features is None else (None, None, features)
        self._dtype = INTEGER if features is None else FLOAT
        self._layers: list[dict[str, Any]] = []
        self._weights: dict[str, Mapping[str, Array]] = {}
        self._place = ""
        self.input = self._add("InputLayer", "input", (), shape, {"batch_shape": list(shape), "dtype": self._dtype})

    def start(self, place: str) -> None:
        """Name the layers that follow after a part of the model."""
        self._place = place.replace(".", "_")

    def add(
        self, kind: str, *inputs: Tensor, shape: Shape, weights: Mapping[str, Array] | None = None, **config: Any
    ) -> Tensor:
        """Add a layer; return its first output. Several inputs are a list of tensors. weights: in the order of Keras."""
        name = f"{self._place}_{kind.lower()}_{len(self._layers)}"
        return self._add(kind, name, inputs, shape, config, weights or {})

    def _add(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Tensor],
        shape: Shape,
        config: Mapping[str, Any],
        weights: Mapping[str, Array] | None = None,
    ) -> Tensor:
        arguments: Any = [self._reference(tensor) for tensor in inputs]
        nodes: list[dict[str, Any]] = [{"args": arguments if len(inputs) == 1 else [arguments], "kwargs": {}}] if inputs else []
        self._layers.append({"class_name": kind, "config": {"name": name, **config}, "name": name, "inbound_nodes": nodes})
        self._weights[name] = weights or {}
        return Tensor(name, 0, shape)

    def _reference(self, tensor: Tensor) -> dict[str, Any]:
        dtype = self._dtype if tensor == self.input else FLOAT
        history = [tensor.layer, 0, tensor.output]
        config = {"shape": list(tensor.shape), "dtype": dtype, "keras_history": history}
        return {"class_name": "__keras_tensor__", "config": config}

    def h5(self, name: str, output: Tensor) -> bytes:
        """Return the file of the model with this output."""
        places = [[self.input.layer, 0, 0]], [[output.layer, 0, output.output]]
        config = {"name": name, "layers": self._layers, "input_layers": places[0], "output_layers": places[1]}
        stream = io.BytesIO()
        with h5py.File(stream, "w") as file:
            file.attrs["model_config"] = json.dumps({"class_name": "Functional", "config": config})
            root = file.create_group("model_weights")
            root.attrs["layer_names"] = list(self._weights)
            for group in (file, root):
                group.attrs["keras_version"], group.attrs["backend"] = VERSION, "numpy"
            for layer, arrays in self._weights.items():
                own = root.create_group(layer)
                own.attrs["weight_names"] = [f"{layer}/{weight}" for weight in arrays]
                for weight, array in arrays.items():
                    own.create_dataset(f"{layer}/{weight}", data=array)
            root.create_group("top_level_model_weights").attrs["weight_names"] = []
        return stream.getvalue()
