"""What every layer of a model can do on a device.

The first layer of a model over tokens takes ids. It embeds them as they are, or gathers from tables into which the embedding and
the layer's first product were folded at load; both give the same within rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged

EMBEDDED, FOLDED = "embedding and product", "folded table"
"""The two ways in which a first layer takes ids."""


class Runs(ABC):
    """One layer of a model. `takes_ids` says how the first layer of a model over tokens makes use of the embedding."""

    takes_ids: str | None = None

    @abstractmethod
    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        """x.data: the layer below's steps, the features, or, in a first layer over tokens, (tokens,) ids."""

    @abstractmethod
    def embed(self, table: Tensor) -> None:
        """Take ids from now on, embedded as they are."""

    @abstractmethod
    def fold(self, table: Tensor) -> None:
        """Take ids from now on, through tables of embedding and first product."""

    @abstractmethod
    def folded_bytes(self, table: Tensor) -> int:
        """Bytes of those tables, known before they are made."""

    @abstractmethod
    def backend(self) -> str:
        """Name of the kernel backend that runs this layer."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What it holds on the device."""


def side_by_side(parts: Sequence[Encoded]) -> Encoded:
    """Outputs of the same rows, joined along their width; the state is the first part's."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Tensor | None:
        given = [getattr(part, name) for part in parts]
        return None if given[0] is None else torch.cat(given, dim=1)

    return Encoded(parts[0].state, *(joined(name) for name in ("steps", "last", "mean", "max")))


def once(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Without those that are held by several."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def tensors_of(weights: Any) -> list[Tensor]:
    """The arrays of a dataclass of weights, and what a kernel made of them and keeps."""
    values = [getattr(weights, field.name) for field in fields(weights)]
    return [value for value in values if isinstance(value, Tensor)] + [*getattr(weights, "packed", {}).values()]
