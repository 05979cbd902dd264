"""A model as exporters take it: its description, and its tensors by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from service.errors import ModelError
from service.importers.draft import Array
from service.modeling.spec import Layer, ModelSpec


class ExportRefused(ModelError):
    """The format cannot express the model. The message names the part that the format lacks, and an alternative."""


@dataclass(frozen=True, slots=True)
class Part:
    """One layer, or the head. place: the start of the names of its tensors; inputs: width of the layer below; arrays: by the rest of
    their names."""

    place: str
    kind: str
    inputs: int
    arrays: dict[str, Tensor]

    @property
    def label(self) -> str:
        """The part as messages name it."""
        return f"{self.place} ({self.kind})"

    def numpy(self, name: str) -> Array:
        """Return a tensor in float32."""
        return np.ascontiguousarray(self.arrays[name].float().numpy())

    def refuse(self, condition: object, what: str, advice: str) -> None:
        """Raise ExportRefused if a condition holds. what: states the option that the format lacks."""
        if condition:
            raise ExportRefused(f"{self.label}: {what}. {advice}")


@dataclass(frozen=True, slots=True)
class Model:
    """A model to export. arrays: every tensor by its name; matrices of an int8 model are float32."""

    spec: ModelSpec
    arrays: Mapping[str, Tensor]

    def layers(self) -> Iterator[tuple[Layer, Part]]:
        """Yield each layer of model.toml and its tensors."""
        inputs = self.spec.input.vocabulary or self.spec.input.features or 0
        for index, layer in enumerate(self.spec.layers):
            yield layer, self._part(f"layers.{index}", layer.kind, inputs)
            inputs = layer.output_width(inputs)

    def head(self) -> Part:
        return self._part("head", self.spec.head.kind, self.spec.output_width)

    def _part(self, place: str, kind: str, inputs: int) -> Part:
        own = {name: array for name, array in self.arrays.items() if name.startswith(f"{place}.")}
        return Part(place, kind, inputs, {name.removeprefix(f"{place}."): array for name, array in own.items()})


@dataclass(slots=True)
class Export:
    """An exported model.

    content: the file; recipe: for `seqserve import --recipe`, which then reads the same model; notes: for the user of the file.
    """

    content: bytes
    recipe: dict[str, Any]
    notes: list[str] = field(default_factory=list)
