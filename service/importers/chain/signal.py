"""Represents a tensor of a graph by its meaning: which axes are the batch and the steps, and which column each other entry holds.

The graph itself is not run. An entry of a vector is an index into the joined columns of `parts`, the nodes that computed it, so every
transposition, reshape, slice and concatenation of a graph is the same operation on an array of indexes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from service.importers.chain.nodes import Node
from service.importers.draft import ImportRefused

Columns = NDArray[np.int64]
MOST_COLUMNS = 1 << 20


class Role(Enum):
    """The meaning of an axis."""

    BATCH = "batch"
    STEPS = "steps"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class Atom:
    """An axis with a single meaning."""

    role: Role
    size: int


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a signal: one atom, or the batch and the steps as one axis."""

    atoms: tuple[Atom, ...]

    @property
    def size(self) -> int:
        return math.prod(atom.size for atom in self.atoms)

    @property
    def is_columns(self) -> bool:
        return self.atoms[0].role is Role.COLUMNS

    @property
    def is_unit(self) -> bool:
        return self.is_columns and self.size == 1

    def __str__(self) -> str:
        return " and ".join(atom.role.value for atom in self.atoms)


def axis(role: Role, size: int) -> Axis:
    return Axis((Atom(role, size),))


UNIT = axis(Role.COLUMNS, 1)


@dataclass(frozen=True, eq=False)
class Signal:
    """A tensor that depends on the input sequence.

    columns: indexes into the joined columns of the parts, with one dimension for each axis of columns, in their order.
    is_reversed: the steps are in reverse order; rows_are_sorted: the sequences are sorted by length; pads: zero steps before and after
    each sequence, for the window that follows.
    """

    axes: tuple[Axis, ...]
    parts: tuple[Node, ...]
    columns: Columns
    is_reversed: bool = False
    rows_are_sorted: bool = False
    pads: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        _check_columns(self.columns.size)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def rank(self) -> int:
        return len(self.axes)

    @property
    def has_steps(self) -> bool:
        return self._find(Role.STEPS) is not None

    @property
    def steps_axis(self) -> int:
        """The axis of steps; raises ImportRefused if no axis counts only steps."""
        found = self._find(Role.STEPS)
        if found is None or len(self.axes[found].atoms) > 1:
            raise ImportRefused("its input has no axis of steps")
        return found

    @property
    def batch(self) -> Axis:
        """The axis of the batch; of a single entry if the graph takes one sequence."""
        found = self._find(Role.BATCH)
        return UNIT if found is None else self.axes[found]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(str(axis) for axis in self.axes)

    def is_on(self, index: int, role: Role) -> bool:
        """Whether an axis has this meaning. A negative index counts from the end."""
        return self.axes[index].atoms == (Atom(role, self.axes[index].size),)

    def expect(self, *roles: Role) -> None:
        """Raise ImportRefused unless these are the axes. An axis of size 1 serves as the batch of a graph that takes one sequence."""
        one_sequence = self._find(Role.BATCH) is None
        fits = [
            self.is_on(index, role) or (one_sequence and role is Role.BATCH and self.axes[index].is_unit)
            for index, role in enumerate(roles[: self.rank])
        ]
        if len(roles) != self.rank or not all(fits):
            expected = ", ".join(role.value for role in roles)
            raise ImportRefused(f"its input has the axes {', '.join(self.roles)}, and not {expected}")

    def transpose(self, order: Sequence[int]) -> Signal:
        """Return the signal with its axes in another order."""
        if sorted(order) != list(range(self.rank)):
            raise ImportRefused(f"it orders {self.rank} axes by {list(order)}")
        before = [index for index, one in enumerate(self.axes) if one.is_columns]
        after = [before.index(index) for index in order if self.axes[index].is_columns]
        return replace(self, axes=tuple(self.axes[index] for index in order), columns=self.columns.transpose(after))

    def reshape(self, shape: Sequence[int]) -> Signal:
        """Return the signal in a shape of equal size. Columns may be split and joined, and the batch and the steps joined."""
        axes = _regrouped(self.axes, shape)
        return self._with_axes(axes)

    def without_axes(self, indexes: Sequence[int]) -> Signal:
        """Return the signal without axes of size 1."""
        for index in indexes:
            if self.axes[index].size != 1:
                raise ImportRefused(f"it removes the axis of {self.axes[index]}, which has more than one entry")
            if not self.axes[index].is_columns:
                raise ImportRefused(f"it removes the axis of {self.axes[index]}")
        kept = [one for index, one in enumerate(self.axes) if index not in set(indexes)]
        return self._with_axes(kept)

    def with_units(self, indexes: Sequence[int]) -> Signal:
        """Return the signal with new axes of size 1 at these indexes of the result."""
        axes = list(self.axes)
        for index in sorted(indexes):
            axes.insert(index, UNIT)
        return self._with_axes(axes)

    def take(self, indexes: NDArray[np.int64], index: int) -> Signal:
        """Return the entries of an axis of columns at `indexes`. The shape of `indexes` replaces the axis."""
        position = self._position(index)
        _check_columns(indexes.size * (self.columns.size // max(1, self.shape[index])))
        taken = np.take(self.columns, indexes, axis=position)
        new = [axis(Role.COLUMNS, size) for size in indexes.shape]
        return replace(self, axes=(*self.axes[:index], *new, *self.axes[index + 1 :]), columns=taken).pruned()

    def expand(self, shape: Sequence[int]) -> Signal:
        """Return the signal with axes of size 1 repeated, as far as they are axes of columns."""
        aligned = self.with_units(range(len(shape) - self.rank)) if len(shape) > self.rank else self
        axes = []
        for one, size in zip(aligned.axes, [1] * (aligned.rank - len(shape)) + list(shape), strict=True):
            if size not in (1, one.size) and not one.is_unit:
                raise ImportRefused(f"it repeats the axis of {one}")
            axes.append(axis(Role.COLUMNS, size) if one.is_unit else one)
        sizes = [one.size for one in axes if one.is_columns]
        return replace(aligned, axes=tuple(axes), columns=np.broadcast_to(aligned.columns, sizes))

    def pruned(self) -> Signal:
        """Return the signal without the parts that have no column left."""
        bounds = np.cumsum([0, *(part.width for part in self.parts)])
        owners = np.searchsorted(bounds, self.columns.ravel(), side="right") - 1
        kept = [index for index in range(len(self.parts)) if (owners == index).any()]
        if len(kept) == len(self.parts):
            return self
        widths = [self.parts[index].width for index in kept]
        shift = np.zeros(len(self.parts), np.int64)
        shift[kept] = bounds[kept] - np.cumsum([0, *widths[:-1]])
        columns = self.columns - shift[owners].reshape(self.columns.shape)
        return replace(self, parts=tuple(self.parts[index] for index in kept), columns=columns)

    def map_parts(self, change: Callable[[Node], Node]) -> Signal:
        """Return the signal with each part replaced by a node with the same number of columns."""
        return replace(self, parts=tuple(change(part) for part in self.parts))

    def over(self, node: Node, index: int) -> Signal:
        """Return the signal of all columns of a new node, along the axis of columns at `index`."""
        axes = (*self.axes[:index], axis(Role.COLUMNS, node.width), *self.axes[index + 1 :])
        shape = [one.size for one in axes if one.is_columns]
        return replace(self, axes=axes, parts=(node,), columns=np.arange(node.width).reshape(shape), pads=(0, 0))

    def sorted_rows(self, index: int, *, restores: bool) -> Signal:
        """Return the signal with its sequences sorted by length along an axis, or restored to their order. One sequence has no order."""
        if self._find(Role.BATCH) is None and self.axes[index].is_unit:
            return self
        if not self.is_on(index, Role.BATCH) or self.rows_are_sorted != restores:
            raise ImportRefused("it changes the order of something else than the sequences of a batch")
        return replace(self, rows_are_sorted=not restores)

    def with_step_count(self, steps: int) -> Signal:
        index = self.steps_axis
        return replace(self, axes=(*self.axes[:index], axis(Role.STEPS, steps), *self.axes[index + 1 :]))

    def _position(self, index: int) -> int:
        """Return the dimension of `columns` of an axis; raises ImportRefused if it is no axis of columns."""
        if not self.axes[index].is_columns:
            raise ImportRefused(f"it works on the axis of {self.axes[index]}")
        return sum(one.is_columns for one in self.axes[:index])

    def _find(self, role: Role) -> int | None:
        return next((i for i, one in enumerate(self.axes) if any(atom.role is role for atom in one.atoms)), None)

    def _with_axes(self, axes: Sequence[Axis]) -> Signal:
        sizes = [one.size for one in axes if one.is_columns]
        return replace(self, axes=tuple(axes), columns=self.columns.reshape(sizes))


def concatenate(signals: Sequence[Signal], index: int) -> Signal:
    """Return the signals joined along an axis of columns."""
    first = signals[0]
    for other in signals[1:]:
        same = [a == b or number == index for number, (a, b) in enumerate(zip(first.axes, other.axes, strict=False))]
        if other.rank != first.rank or not all(same) or other.is_reversed != first.is_reversed:
            raise ImportRefused(f"it joins tensors with the axes {first.roles} {first.shape} and {other.roles} {other.shape}")
    _check_columns(sum(signal.columns.size for signal in signals))
    parts: list[Node] = []
    columns = []
    for signal in signals:
        new, shifted = _shared(parts, signal)
        parts += new
        columns.append(shifted)
    joined = np.concatenate(columns, axis=first._position(index))
    size = sum(signal.shape[index] for signal in signals)
    return replace(
        first,
        axes=(*first.axes[:index], axis(Role.COLUMNS, size), *first.axes[index + 1 :]),
        parts=tuple(parts),
        columns=joined,
    )


def _check_columns(count: int) -> None:
    if count > MOST_COLUMNS:
        raise ImportRefused(f"it makes {count} columns, and the limit is {MOST_COLUMNS}")


def _shared(parts: Sequence[Node], signal: Signal) -> tuple[list[Node], Columns]:
    """Return the parts of a signal that are not among `parts`, and its columns as indexes into the columns of both."""
    new = [part for part in signal.parts if not any(part is other for other in parts)]
    every = [*parts, *new]
    starts = np.cumsum([0, *(part.width for part in every)])
    columns = np.empty_like(signal.columns)
    begin = 0
    for part in signal.parts:
        of_part = (signal.columns >= begin) & (signal.columns < begin + part.width)
        place = next(index for index, other in enumerate(every) if other is part)
        columns[of_part] = signal.columns[of_part] - begin + starts[place]
        begin += part.width
    return new, columns


def _regrouped(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """Return axes of the sizes in `shape`, each of consecutive atoms."""
    left = deque(atom for one in axes for atom in one.atoms if atom != UNIT.atoms[0])
    regrouped = []
    for size in shape:
        group: list[Atom] = []
        while (taken := math.prod(atom.size for atom in group)) < size or (size == 1 and not group and _is_single(left)):
            if not left:
                raise ImportRefused(f"it makes the shape {tuple(shape)} of other entries")
            atom = left.popleft()
            if (
                taken * atom.size > size
                and atom.role is Role.COLUMNS
                and size % taken == 0
                and atom.size % (size // taken) == 0
            ):
                left.appendleft(Atom(Role.COLUMNS, atom.size // (size // taken)))
                atom = Atom(Role.COLUMNS, size // taken)
            group.append(atom)
        regrouped.append(_joined(group, size))
    if any(atom.size > 1 or atom.role is not Role.COLUMNS for atom in left):
        raise ImportRefused(f"it makes the shape {tuple(shape)} of more entries")
    return regrouped


def _is_single(atoms: deque[Atom]) -> bool:
    """Whether the next atom is the only step."""
    return bool(atoms) and atoms[0].size == 1 and atoms[0].role is Role.STEPS


def _joined(group: Sequence[Atom], size: int) -> Axis:
    roles = {atom.role for atom in group}
    total = math.prod(atom.size for atom in group)
    if total != size or (Role.COLUMNS in roles and len(roles) > 1):
        what = " and ".join(atom.role.value for atom in group)
        raise ImportRefused(f"it makes one axis of {size} of {what}: a model takes sequences of any length")
    return Axis(tuple(group)) if group and Role.COLUMNS not in roles else axis(Role.COLUMNS, size)
