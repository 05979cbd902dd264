"""What every layer of a model can do on a device.

The first layer of a model over tokens takes ids. It embeds them as they are, or gathers from tables into which the embedding and
the layer's first product were folded at load; both give the same within rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged, arithmetic
from kernels.embedding import embed

EMBEDDED, FOLDED = "embedding and product", "folded table"
"""The two ways in which a first layer takes ids."""


class Runs(ABC):
    """One layer of a model, or several that run as one."""

    takes_ids: str | None = None
    """How the first layer of a model over tokens makes use of the embedding."""
    linear: tuple[Tensor, Tensor] | None = None
    """Weight and bias of the head's linear layer, for a top layer that can see to it: Encoded.scores."""

    @abstractmethod
    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        """x.data: the layer below's steps, the features, or, in a first layer over tokens, (tokens,) ids."""

    @property
    def streams(self) -> bool:
        """Whether the chunks of a row, each going on from where the one before it ended, give what the whole row gives."""
        return False

    @property
    def free_states(self) -> bool:
        """Whether going on from a state takes no longer than beginning."""
        return False

    def slabs(self, places: int) -> list[Any]:
        """Room for the states of so many sequences, layer by layer: all zeros, from which a row begins."""
        raise NotImplementedError(f"{type(self).__name__} keeps no state")

    def chunk(self, x: Ragged, want: Outputs, states: Sequence[Any] | None) -> tuple[Encoded, list[Any]]:
        """Goes on from `states`, layer by layer; returns what comes out and the states after it."""
        raise NotImplementedError(f"{type(self).__name__} keeps no state")

    @abstractmethod
    def embed(self, table: Tensor) -> None:
        """Take ids from now on, embedded as they are."""

    @abstractmethod
    def fold(self, table: Tensor) -> None:
        """Take ids from now on, through tables of embedding and first product."""

    @abstractmethod
    def folded_bytes(self, table: Tensor) -> int | None:
        """Bytes of those tables, known before they are made, or None where there can be none."""

    @abstractmethod
    def backend(self) -> str:
        """Name of the kernel backend that runs this layer."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What it holds on the device."""


def embedded(ids: Ragged, table: Tensor) -> Ragged:
    """Rows of ids as rows of vectors, in the arithmetic of the device."""
    return Ragged(embed(ids.data, table, arithmetic(table.dtype, table.device)), ids.offsets)


def once(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Without those that are held by several."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def tensors_of(weights: Any) -> list[Tensor]:
    """The arrays of a dataclass of weights and of those within it, and what a kernel made of them and keeps."""
    values = [getattr(weights, field.name) for field in fields(weights)]
    within = [tensor for value in values if is_dataclass(value) for tensor in tensors_of(value)]
    return [value for value in values if isinstance(value, Tensor)] + within + [*getattr(weights, "packed", {}).values()]


def held_bytes(tensors: Sequence[Tensor]) -> int:
    """What they take on the device, with what stands between the rows of aligned tables."""
    return sum(max(one.numel(), one.shape[0] * one.stride(0)) * one.element_size() for one in tensors)
