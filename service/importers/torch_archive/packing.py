"""Translates packed sequences of torch: sequences of different lengths, sorted by length, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.importers.chain.signal import Role, Signal
from service.importers.chain.values import Constant, Lengths, Order
from service.importers.draft import ImportRefused
from service.importers.torch_archive.operation import ArchiveOperation


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The steps of all sequences. steps: the sequences with padding, (steps, batch, ...) or (batch, steps, ...)."""

    steps: Signal
    batch_first: bool
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The number of sequences that have each step."""

    lengths: Lengths


def pack(operation: ArchiveOperation) -> list[Any]:
    x, lengths = operation.x, operation["lengths"]
    if not isinstance(lengths, Lengths) or lengths.plus:
        raise ImportRefused("it packs by other numbers than the lengths of the sequences")
    batch_first = bool(operation["batch_first"])
    x.expect(*((Role.BATCH, Role.STEPS) if batch_first else (Role.STEPS, Role.BATCH)), Role.COLUMNS)
    operation.reading.lengths = True
    return [Packed(x, batch_first, lengths), BatchSizes(lengths)]


def pad(operation: ArchiveOperation) -> list[Any]:
    packed = operation["data"]
    if not isinstance(packed, Packed) or operation["padding_value"]:
        raise ImportRefused("it pads with other numbers than zero, or what was not packed")
    steps = packed.steps
    if packed.batch_first != bool(operation["batch_first"]):
        steps = steps.transpose([1, 0, *range(2, steps.rank)])
    return [steps, packed.lengths]


def sort(operation: ArchiveOperation) -> Any:
    """Sort all lengths in descending order."""
    largest = int(bool(operation.call.get("descending")))
    return operation.onnx("TopK", operation.first, [operation.reading.batch], outputs=2, largest=largest)


def empty_like(operation: ArchiveOperation) -> Constant:
    return Constant(np.zeros(operation.reading.batch, np.int64))


def index(operation: ArchiveOperation) -> Lengths:
    """Return lengths in another order."""
    lengths, indices = operation["self"], operation["indices"]
    if not isinstance(lengths, Lengths) or not all(isinstance(one, Order) for one in indices):
        raise ImportRefused("it takes entries by lists of indexes: use slices")
    return lengths


OPERATORS: dict[str, Callable[[ArchiveOperation], Any]] = {
    "_pack_padded_sequence": pack,
    "_pad_packed_sequence": pad,
    "argsort": lambda operation: sort(operation)[1],
    "empty_like": empty_like,
    "index": index,
    "sort": sort,
}
