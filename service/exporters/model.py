"""A model as exporters take it: its description, and its tensors by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from service.errors import ModelError
from service.importers.draft import Array
from service.modeling.spec import ModelSpec
from service.modeling.spec.layers import Layer


class ExportRefused(ModelError):
    """The format cannot express the model. The message names the part that the format lacks, and an alternative."""


@dataclass(frozen=True, slots=True)
class ExportedPart:
    """One layer, or the head. place: the start of the names of its tensors; inputs: width of the layer below; arrays: by the rest of
    their names."""

    place: str
    kind: str
    inputs: int
    arrays: dict[str, Tensor]

    def numpy(self, name: str) -> Array:
        """Return a tensor in float32."""
        return np.ascontiguousarray(self.arrays[name].float().numpy())

    def below(self, level: int) -> dict[str, Tensor]:
        """Return the tensors of a level, by the rest of their names."""
        start = f"{level}."
        return {name.removeprefix(start): array for name, array in self.arrays.items() if name.startswith(start)}

    def refuse(self, condition: object, what: str, advice: str) -> None:
        """Raise ExportRefused if a condition holds. what: states the option that the format lacks."""
        if condition:
            raise ExportRefused(f"{self.place} ({self.kind}): {what}. {advice}")


@dataclass(frozen=True, slots=True)
class Model:
    """A model to export. arrays: every tensor by its name; matrices of an int8 model are float32."""

    spec: ModelSpec
    arrays: Mapping[str, Tensor]

    def layers(self) -> Iterator[tuple[Layer, ExportedPart]]:
        """Yield each layer of model.toml and its tensors."""
        inputs = self.spec.input.vocabulary or self.spec.input.features or 0
        for index, layer in enumerate(self.spec.layers):
            yield layer, self._part(f"layers.{index}", layer.kind, inputs)
            inputs = layer.output_width(inputs)

    def recipe(self) -> dict[str, Any]:
        """Return the recipe's keys of the top level. A model that is imported has no int8 weights: `seqserve compress` makes them."""
        tables = self.spec.model_dump(exclude_defaults=True, exclude={"name", "sha256", "input", "layers", "head"})
        return tables | ({"precision": "float32"} if self.spec.precision == "int8" else {})

    def head(self) -> ExportedPart:
        return self._part("head", self.spec.head.kind, self.spec.output_width)

    def _part(self, place: str, kind: str, inputs: int) -> ExportedPart:
        start = f"{place}."
        arrays = {name.removeprefix(start): array for name, array in self.arrays.items() if name.startswith(start)}
        return ExportedPart(place, kind, inputs, arrays)


@dataclass(frozen=True, slots=True)
class Export:
    """An exported model.

    content: the file; recipe: for `seqserve import --recipe`, which then reads the same model; note: for the user of the file, or empty.
    """

    content: bytes
    recipe: dict[str, Any]
    note: str = ""
