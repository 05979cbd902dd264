"""The arrays of an answer as output tensors of the Open Inference Protocol, row by row as the model's head says it.

What is said of every step is padded to the longest row with zeros and empty strings, beside `lengths`; or, for a request whose rows lay end
to end, it lies so too, beside `offsets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidInput, TooLarge
from service.frontend.head_outputs import shortest
from service.frontend.oip import metadata
from service.frontend.oip.metadata import LENGTHS, OFFSETS
from service.frontend.oip.tensors import BYTES, Tensor
from service.frontend.wording import shown
from service.modeling.spec import ClassifyHead, ModelSpec, NextHead, SequenceHead, SpanHead, TagHead

Array = NDArray[Any]

PADDED_BYTES = 64 << 20
"""No output is padded to more than this: one long row among many short ones would make much of little."""
PER_STEP = ("labels", "sequence")


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that a caller names. classes: of how many of the best labels he wants a line of text each; 0 for the scores themselves."""

    name: str
    classes: int = 0


def check(wanted: Sequence[Wanted], spec: ModelSpec) -> None:
    """Whether the model gives this; raises InvalidInput. There are callers who want whatever its metadata names, so that all of it is given
    together, lengths and offsets among it."""
    named = [one.name for one in wanted]
    known = [port.name for port in metadata.outputs(spec)]
    for index, one in enumerate(wanted):
        if one.name not in known:
            raise _wrong(f"{shown(one.name)} is no output of {spec.name}: known are {', '.join(known)}")
        if one.name in named[:index]:
            raise _wrong(f"{one.name} is named twice: name it once")
        if one.classes and not (one.name == "scores" and isinstance(spec.head, ClassifyHead)):
            raise _wrong(f"{one.name} of {spec.name} has no classes to name: leave out classification")
    if not per_step(spec) and {LENGTHS, OFFSETS} & set(named) and "sequence" not in named:
        raise _wrong(f"{LENGTHS} and {OFFSETS} are those of sequence: name it too, or leave them out")


def per_step(spec: ModelSpec) -> bool:
    """Whether the head says something of every step."""
    return isinstance(spec.head, TagHead | SequenceHead)


def outputs(spec: ModelSpec, arrays: list[Array], steps: list[int], wanted: Sequence[Wanted], ragged: bool) -> list[Tensor]:
    """What the caller wants in his order, or all that the head says. arrays: as `answers.arrays` has them; steps: of each row."""
    said = _Said(spec, arrays, _Rows(steps, ragged))
    if not wanted:
        own = [port.name for port in metadata.said(spec)]
        wanted = [Wanted(name) for name in (*own, *([OFFSETS if ragged else LENGTHS] if per_step(spec) else []))]
    return [said.classes(one.classes) if one.classes else said.tensor(one.name) for one in wanted]


@dataclass(frozen=True, slots=True)
class _Rows:
    """How rows stand in what is given per step."""

    steps: list[int]
    ragged: bool

    def spread(self, values: Array, fill: int = 0) -> Array:
        """(steps, ...) of all rows as (1, steps, ...) or (rows, longest, ...)."""
        if self.ragged:
            return values[None]
        shape = (len(self.steps), max(self.steps), *values.shape[1:])
        if len(values) == shape[0] * shape[1]:
            return values.reshape(shape)
        size = int(np.prod(shape)) * values.itemsize
        if size > PADDED_BYTES:
            raise TooLarge(
                f"the answer has {size} bytes when it is padded and {PADDED_BYTES} is the most: send the rows end to end, with offsets"
            )
        spread = np.full(shape, fill, values.dtype)
        spread[np.arange(shape[1]) < np.array(self.steps)[:, None]] = values
        return spread


class _Said:
    """All that there is in one answer; a tensor is made when it is asked for."""

    def __init__(self, spec: ModelSpec, arrays: list[Array], rows: _Rows) -> None:
        self._head = spec.head
        self._scores, self._picks, self._embedding, self._sequence = arrays
        self._rows = rows

    def tensor(self, name: str) -> Tensor:
        """One output by its name."""
        match name, self._head:
            case "label", ClassifyHead(labels=labels):
                best = self._scores.argmax(axis=1)[:, None]
                return _strings(name, best, labels)
            case "labels", TagHead(labels=labels):
                return _strings(name, self._rows.spread(self._picks[:, 0], fill=len(labels)), (*labels, ""))
            case "scores", TagHead():
                return _numbers(name, self._rows.spread(self._scores[:, 0]))
            case "score", ClassifyHead():
                return _numbers(name, self._scores.max(axis=1, keepdims=True))
            case "start" | "end", SpanHead():
                at = ("start", "end").index(name)
                return _numbers(name, self._picks[:, at : at + 1])
            case "ids", NextHead():
                return _numbers(name, self._picks)
            case "embedding", _:
                return _numbers(name, self._embedding)
            case "sequence", _:
                return _numbers(name, self._rows.spread(self._sequence))
            case "lengths", _:
                return _numbers(name, np.array(self._rows.steps, np.int32)[:, None])
            case "offsets", _:
                return _numbers(name, np.array([[0, *accumulate(self._rows.steps)]], np.int32))
        # scores of classify and next, value of regress, score of span
        return _numbers(name, self._scores)

    def classes(self, count: int) -> Tensor:
        """The best labels of each row, best first, as score:index:label."""
        assert isinstance(self._head, ClassifyHead)
        labels = self._head.labels
        best = np.argsort(-self._scores, axis=1, kind="stable")[:, :count]
        lines = [
            f"{score}:{index}:{labels[index]}".encode()
            for scores, picks in zip(self._scores, best, strict=True)
            for score, index in zip(shortest(scores[picks]), picks.tolist(), strict=True)
        ]
        return Tensor("scores", BYTES, best.shape, lines)


def _numbers(name: str, values: Array) -> Tensor:
    return Tensor(name, "INT32" if values.dtype == np.int32 else "FP32", values.shape, values)


def _strings(name: str, picks: Array, strings: Sequence[str]) -> Tensor:
    encoded = [string.encode() for string in strings]
    return Tensor(name, BYTES, picks.shape, [encoded[pick] for pick in picks.ravel().tolist()])


def _wrong(said: str) -> InvalidInput:
    return InvalidInput(said, field="outputs")
