"""Defines the values that names of a graph have while it is interpreted: constants, lengths, masks, orders and states."""

from __future__ import annotations

from dataclasses import dataclass

from service.importers.chain.signal import Signal
from service.importers.draft import Array


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """Numbers that do not depend on an input. origins: the initializers in them."""

    array: Array
    origins: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Lengths:
    """The number of steps of each sequence plus an offset, in any shape, as an input of the graph has it."""

    name: str
    plus: int = 0


@dataclass(frozen=True, slots=True)
class Mask:
    """The steps of a padded batch that belong to their sequences, in any shape. steps: how many steps the batch has."""

    steps: int


@dataclass(frozen=True, slots=True)
class Order:
    """Indexes of the sequences: in descending order of their lengths, or back into the order of the input."""

    restores: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Initial states of recurrent layers, or a part of them, from an input of the graph."""

    name: str


@dataclass(frozen=True, slots=True)
class FinalCell:
    """The final cell state of an LSTM, which no operation can use."""

    label: str


Value = Constant | Signal | Lengths | Mask | Order | State | FinalCell
