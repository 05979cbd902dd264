"""The interface of a layer that runs on a device.

The first layer of a model over tokens takes token ids. It either embeds them and runs its first product, or gathers rows from
tables into which the embedding and that product were folded at load. Both give the same result within rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from kernels.embedding import embed
from kernels.ragged import Encoded, Outputs, Ragged, compute_dtype

EMBEDDED, FOLDED = "embedding and product", "folded table"
"""How a first layer takes token ids."""


class RunnableLayer(ABC):
    """One layer of a model, or several that run as one."""

    takes_ids: str | None = None
    """EMBEDDED or FOLDED for the first layer of a model over tokens, None for every other layer."""
    linear: tuple[Tensor, Tensor] | None = None
    """Weight and bias of the head's linear layer. A last layer that can apply them itself fills Encoded.scores."""

    @abstractmethod
    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        """Run the layer. x.data: the steps of the layer below, the input features, or (tokens,) ids."""

    @property
    def streams(self) -> bool:
        """Whether chunks of a sequence, each resumed from the state of the previous chunk, give the result of the whole
        sequence."""
        return False

    @property
    def resumes_for_free(self) -> bool:
        """Whether resuming from a state takes no longer than starting from zeros."""
        return False

    def allocate_states(self, slots: int) -> list[Any]:
        """Return state slabs for `slots` sequences at their beginning, one entry per inner layer; none for a layer without a state."""
        return []

    def run_chunk(self, x: Ragged, want: Outputs, states: Sequence[Any] | None) -> tuple[Encoded, list[Any]]:
        """Run the layer from `states`, one per inner layer; return the outputs and the new states. x: a whole sequence in each row, unless
        the layer streams."""
        return self(x, want), []

    @abstractmethod
    def embed(self, table: Tensor) -> None:
        """Take ids from now on, and look them up in the embedding `table`."""

    @abstractmethod
    def fold(self, table: Tensor) -> None:
        """Take ids from now on, and look them up in tables of the embedding times the first product."""

    @property
    @abstractmethod
    def folded_columns(self) -> int | None:
        """The numbers that the folded tables have for each token id, or None if this layer cannot fold an embedding."""

    @abstractmethod
    def backend(self) -> str:
        """Return the name of the kernel backend that runs this layer."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tensors that the layer holds on the device."""


def embed_ids(ids: Ragged, table: Tensor) -> Ragged:
    """Return the embeddings of ragged ids, in the device's arithmetic dtype."""
    return Ragged(embed(ids.data, table, compute_dtype(table.dtype, table.device)), ids.offsets)


def unique_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors without duplicates, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def weight_tensors(weights: Any) -> list[Tensor]:
    """Return the tensors of a weights dataclass, of the dataclasses within it, and of what kernels packed from them."""
    values = [getattr(weights, field.name) for field in fields(weights)]
    nested = [tensor for value in values if is_dataclass(value) for tensor in weight_tensors(value)]
    packed = [tensor for layout in getattr(weights, "packed", {}).values() for tensor in _packed_tensors(layout)]
    return [value for value in values if isinstance(value, Tensor)] + nested + packed


def _packed_tensors(layout: Any) -> Sequence[Tensor]:
    """Return the tensors of weights in the layout of a kernel: one tensor, or several in `arrays`."""
    return (layout,) if isinstance(layout, Tensor) else layout.arrays


def device_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that the tensors take on the device, including the padding between rows of aligned tables."""
    return sum(max(tensor.numel(), tensor.shape[0] * tensor.stride(0)) * tensor.element_size() for tensor in tensors)
