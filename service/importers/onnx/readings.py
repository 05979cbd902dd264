"""Lists the ways to read the inputs of a graph: which input is the sequence, and what its axes count.

A graph does not define which axis counts sequences and which axis counts steps. An operator with a fixed meaning of its axes refuses a
wrong reading, so the importer tries the readings in turn, the most common first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from service.importers.chain.nodes import Input
from service.importers.chain.reading import BATCH, STEPS, Reading
from service.importers.chain.signal import MOST_COLUMNS, Role, Signal, axis
from service.importers.chain.values import Lengths, State, Value
from service.importers.draft import Array, Draft, ImportRefused

IDS = (TensorProto.INT32, TensorProto.INT64)
NUMBERS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
LARGEST_RANK = 4
NAMES = {Role.BATCH: re.compile("batch"), Role.STEPS: re.compile("^seq(uence)?$|seq(uence)?_?len|step|time")}
"""Names of axes that count sequences or steps."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of a graph. sizes: of its axes, with None for sizes that the graph leaves open; axes: their names, or empty."""

    name: str
    type: int
    sizes: tuple[int | None, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, info: ValueInfoProto) -> GraphInput:
        tensor = info.type.tensor_type
        if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
            raise ImportRefused(f"the input {info.name} has no shape: export the model with the shapes of its inputs")
        if tensor.elem_type not in (*IDS, *NUMBERS):
            raise ImportRefused(f"the input {info.name} has numbers of the type {TensorProto.DataType.Name(tensor.elem_type)}")
        sizes = tuple(dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim)
        return cls(info.name, tensor.elem_type, sizes, tuple(str(dim.dim_param).lower() for dim in tensor.shape.dim))

    @property
    def has_ids(self) -> bool:
        return self.type in IDS

    @property
    def dtype(self) -> np.dtype[Any]:
        return helper.tensor_dtype_to_np_dtype(self.type)


@dataclass(frozen=True, slots=True)
class InputPlan:
    """One way to read the inputs: which of them is the sequence, what its axes count, and the other inputs."""

    sequence: GraphInput
    roles: tuple[Role, ...]
    others: tuple[GraphInput, ...]

    def start(self, opset: int, steps: int | None = None) -> Start:
        """Return the start of a reading. steps: of the sequence, if the graph works for no other number."""
        given = {Role.BATCH: BATCH, Role.STEPS: steps or STEPS}
        sizes = [size or given[role] for role, size in zip(self.roles, self.sequence.sizes, strict=True)]
        by_role = dict(zip(self.roles, sizes, strict=True))
        fixed = steps is not None or self.sequence.sizes[self.roles.index(Role.STEPS)] is not None
        reading = Reading(by_role.get(Role.BATCH, 1), by_role[Role.STEPS], fixed, opset)
        columns = [size for role, size in zip(self.roles, sizes, strict=True) if role is Role.COLUMNS]
        width = math.prod(columns)
        node = reading.ids if self.sequence.has_ids else Input(width)
        axes = tuple(axis(role, size) for role, size in zip(self.roles, sizes, strict=True))
        values: dict[str, Value] = {self.sequence.name: Signal(axes, (node,), np.arange(width).reshape(columns))}
        for other in self.others:
            values[other.name] = Lengths(other.name) if _is_lengths(other) else State(other.name)
        return Start(self, reading, values)

    def sample(self, row: Array) -> dict[str, Array]:
        """Return the inputs for one sequence, (steps,) ids or (steps, features), as often as the graph takes sequences."""
        pairs = list(zip(self.roles, self.sequence.sizes, strict=True))
        batch = next((size or 1 for role, size in pairs if role is Role.BATCH), 1)
        outer = [role for role in (Role.BATCH, Role.STEPS) if role in self.roles]
        columns = [size or 1 for role, size in pairs if role is Role.COLUMNS]
        places = {
            role: [index for index, each in enumerate([*outer, *[Role.COLUMNS] * len(columns)]) if each is role]
            for role in Role
        }
        data = np.repeat(row[None], batch, 0).reshape(
            [*({Role.BATCH: batch, Role.STEPS: len(row)}[role] for role in outer), *columns]
        )
        arrays = {self.sequence.name: data.transpose([places[role].pop(0) for role in self.roles]).astype(self.sequence.dtype)}
        for other in self.others:
            shape = [batch] if other.has_ids else [size or batch for size in other.sizes]
            arrays[other.name] = np.full(shape, len(row) if other.has_ids else 0, other.dtype)
        return arrays


class Start(NamedTuple):
    """The start of a reading: how the inputs are read, and their values by name."""

    plan: InputPlan
    reading: Reading
    values: dict[str, Value]


def plans(inputs: Sequence[GraphInput]) -> Iterator[InputPlan]:
    """Return each way to read the inputs."""
    for sequence in inputs:
        others = tuple(other for other in inputs if other is not sequence)
        if 1 <= len(sequence.sizes) <= LARGEST_RANK and all(_is_lengths(other) or _is_state(other) for other in others):
            yield from (InputPlan(sequence, roles, others) for roles in _roles(sequence))


def first_draft(path: Path, readings: Iterable[Start], translate: Callable[[Start], Draft]) -> tuple[Draft, Start] | None:
    """Return the model of the first reading of the inputs that makes one, and this reading; None if there is no reading.

    Raises ImportRefused if no reading makes a model, with the reason at the reading in which most operators were understood.
    """
    failures: list[tuple[int, ImportRefused]] = []
    for start in readings:
        try:
            return translate(start), start
        except ImportRefused as refused:
            failures.append((start.reading.progress, refused))
    if not failures:
        return None
    furthest = max(failures, key=lambda failure: failure[0])[1]
    raise ImportRefused(f"{path}: {furthest}") from furthest


def _roles(sequence: GraphInput) -> list[tuple[Role, ...]]:
    """Return the meanings that the axes may have, the most common first.

    An axis of one entry is no batch: such a graph takes one sequence. An axis of columns has a fixed size, and there is one at most
    with more than one entry, which token ids do not have. An axis with a name such as "batch" or "seq_len" has the meaning of its name.
    """
    rank = len(sequence.sizes)
    every = {
        roles
        for columns in range(rank)
        for roles in permutations((Role.BATCH, Role.STEPS, *[Role.COLUMNS] * columns), rank)
        if Role.STEPS in roles
    }
    return sorted((roles for roles in every if _fits(sequence, roles)), key=_rarity)


def _fits(sequence: GraphInput, roles: Sequence[Role]) -> bool:
    pairs = list(zip(roles, sequence.sizes, strict=True))
    columns = [size for role, size in pairs if role is Role.COLUMNS]
    if None in columns or math.prod(size or 1 for size in columns) > MOST_COLUMNS or (Role.BATCH, 1) in pairs:
        return False
    for role, name in zip(roles, sequence.axes, strict=True):
        if any(meaning is not role and pattern.search(name) for meaning, pattern in NAMES.items()):
            return False
    wide = [size for size in columns if size != 1]
    return len(wide) <= (0 if sequence.has_ids else 1)


def _rarity(roles: Sequence[Role]) -> tuple[bool, bool, int, int]:
    has_batch = Role.BATCH in roles
    first = roles.index(Role.BATCH) if has_batch else -1
    return not has_batch, first > 0, roles.index(Role.STEPS), first


def _is_lengths(one: GraphInput) -> bool:
    return one.has_ids and len(one.sizes) == 1


def _is_state(one: GraphInput) -> bool:
    return not one.has_ids and len(one.sizes) in (2, 3, 4)
