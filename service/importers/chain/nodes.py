"""Defines the nodes of a chain, which compute the columns of signals, from the input of the model upwards.

Every operation makes a new node above the nodes of its inputs. A node is immutable, and two nodes are the same if they are the same object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.importers.chain.functions import Function
from service.importers.draft import Array, ImportRefused
from service.modeling.layers import GATED

NO_ORIGINS: frozenset[str] = frozenset()
RECURRENT = (*GATED,)
LINEAR = ("dense", "conv")
LARGEST_MATRIX = 1 << 26
"""Numbers of a matrix that is not in the source, such as a matrix that copies columns."""


@dataclass(frozen=True, eq=False)
class Input:
    """The sequence that a request sends: token ids, which are one column, or features."""

    width: int
    is_ids: bool = False


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of model.toml over steps, or over one vector per sequence if a Pooled is below it.

    table, arrays: as in `Part`; label: the operation of the source; origins: the names of the source's tensors in it.
    """

    below: Node
    table: dict[str, Any]
    arrays: dict[str, Array]
    width: int
    label: str
    origins: frozenset[str] = NO_ORIGINS

    @property
    def kind(self) -> str:
        kind: str = self.table["kind"]
        return kind

    @property
    def is_linear(self) -> bool:
        """Whether the layer ends in a product with its weights, into which another factor can be folded."""
        return self.kind == "embedding" or (self.kind in LINEAR and self.table["activation"] == "none")

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions of a recurrent layer."""
        return ("forward", "backward") if self.table.get("bidirectional") else (self.table.get("direction", "forward"),)

    def changed(self, *, arrays: dict[str, Array] | None = None, origins: frozenset[str] = NO_ORIGINS, **table: Any) -> Layer:
        """Return this layer with other entries in its table, other arrays and more origins."""
        return replace(
            self, table={**self.table, **table}, arrays={**self.arrays, **(arrays or {})}, origins=self.origins | origins
        )


@dataclass(frozen=True, eq=False)
class Pooled:
    """One vector per sequence: the joined pools of the steps below. table, arrays: keys and arrays that the pool adds to the head."""

    below: Node
    pools: tuple[str, ...]
    table: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    origins: frozenset[str] = NO_ORIGINS

    @property
    def width(self) -> int:
        return self.below.width * len(self.pools)


class _AsWideAsBelow:
    """A node with as many columns as the node below it."""

    below: Node

    @property
    def width(self) -> int:
        return self.below.width


@dataclass(frozen=True, eq=False)
class Mapped(_AsWideAsBelow):
    """A function of every number below. Several of them may together be one activation of model.toml: x * sigmoid(x) is silu."""

    below: Node
    function: Function
    label: str
    origins: frozenset[str] = NO_ORIGINS


@dataclass(frozen=True, eq=False)
class Added(_AsWideAsBelow):
    """The sum of two nodes of the same width, such as a residual connection."""

    below: Node
    other: Node
    label: str


@dataclass(frozen=True, eq=False)
class StepWeights:
    """The softmax over the steps of one score for each step, as attention pools have it."""

    below: Node
    label: str

    @property
    def width(self) -> int:
        return 1


@dataclass(frozen=True, eq=False)
class Weighted(_AsWideAsBelow):
    """Every step below times its weight. The sum over all steps is an attention pool."""

    below: Node
    weights: StepWeights
    label: str


Node = Input | Layer | Pooled | Mapped | Added | StepWeights | Weighted
Settled = Input | Layer | Pooled
"""Nodes that are written as they are."""


def origins_of(values: Iterable[Any]) -> frozenset[str]:
    """Return the names of the source's tensors in several values."""
    return NO_ORIGINS.union(*(value.origins for value in values))


def check_matrix(rows: int, columns: int) -> None:
    """Raise ImportRefused for a matrix that is too large to make."""
    if rows * columns > LARGEST_MATRIX:
        raise ImportRefused(f"it needs a matrix of {rows} by {columns} numbers, and the limit is {LARGEST_MATRIX} numbers")


def selection(below: Settled, columns: NDArray[np.int64], label: str) -> Layer:
    """Return a layer that copies columns of a node."""
    check_matrix(below.width, len(columns))
    weight = np.zeros((below.width, len(columns)))
    weight[columns, np.arange(len(columns))] = 1.0
    table = {"kind": "dense", "width": len(columns), "activation": "none"}
    return Layer(below, table, {"weight": weight, "bias": np.zeros(len(columns))}, len(columns), label)


def is_vector(node: Node) -> bool:
    """Whether a node has one vector per sequence rather than one per step."""
    while not isinstance(node, Input | Pooled):
        node = node.below
    return isinstance(node, Pooled)


def same(first: Node, second: Node) -> bool:
    """Whether two nodes compute the same: the same object, or equal layers over the same node."""
    if first is second:
        return True
    if not (isinstance(first, Layer) and isinstance(second, Layer)):
        return False
    arrays = first.arrays.keys() == second.arrays.keys() and all(
        first.arrays[name] is second.arrays[name] for name in first.arrays
    )
    return arrays and first.table == second.table and first.below is second.below
