"""The arrays of an engine's answer as output tensors of the Open Inference Protocol.

Outputs per time step are padded to the longest sequence with zeros and empty strings, and come with `lengths`. If the sequences
of the request are packed end to end, these outputs are packed too, and come with `offsets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidInput, TooLarge
from service.frontend.head_outputs import json_numbers, split_state
from service.frontend.oip import metadata
from service.frontend.oip.limits import MAX_CLASSES
from service.frontend.oip.metadata import LENGTHS, OFFSETS, STATE, state_tensors
from service.frontend.oip.tensors import BYTES, Tensor
from service.frontend.oip.types import RequestedOutput
from service.frontend.quoting import quote
from service.modeling.spec import ModelSpec
from service.modeling.spec.heads import ClassifyHead, NextHead, SequenceHead, SpanHead, TagHead

Array = NDArray[Any]

MAX_PADDED_BYTES = 64 << 20
"""Size limit of a padded output: a single long sequence among many short sequences could inflate a small answer."""


def check_requested(outputs: Sequence[RequestedOutput], spec: ModelSpec) -> None:
    """Raise InvalidInput unless the model has these outputs.

    Some clients request every output that the metadata lists, so `lengths` and `offsets` may be requested together.
    """
    if not outputs:
        return
    names = [output.name for output in outputs]
    known = [tensor.name for tensor in metadata.head_outputs(spec)]
    if not set(names).issubset(known):  # most requests name no others, and need not wait for the list of all
        known = [tensor.name for tensor in (*metadata.outputs(spec), *state_tensors(spec))]
    for index, output in enumerate(outputs):
        if output.name not in known:
            raise _outputs_error(f"{quote(output.name)} is not an output of {spec.name}: its outputs are {', '.join(known)}")
        if output.name in names[:index]:
            raise _outputs_error(f"{output.name} is requested twice: request it once")
        if output.classes and not (output.name == "scores" and isinstance(spec.head, ClassifyHead)):
            raise _outputs_error(f"{output.name} of {spec.name} has no classes: leave classification out")
    if not has_step_outputs(spec) and {LENGTHS, OFFSETS} & set(names) and "sequence" not in names:
        raise _outputs_error(f"{LENGTHS} and {OFFSETS} describe sequence: request sequence too, or leave them out")


def check_classes(outputs: Sequence[RequestedOutput], spec: ModelSpec, sequences: int) -> None:
    """Raise TooLarge for a classification with too many entries, over all sequences."""
    if not isinstance(spec.head, ClassifyHead):
        return
    for output in outputs:
        entries = min(output.classes, len(spec.head.labels)) * sequences
        if entries > MAX_CLASSES:
            raise TooLarge(
                f"the classification would have {entries} entries for {sequences} sequences, but at most {MAX_CLASSES} are "
                "allowed: ask for fewer classes, or for all scores without classification",
                field="outputs",
            )


def has_step_outputs(spec: ModelSpec) -> bool:
    """Return whether the head has outputs per time step."""
    return isinstance(spec.head, TagHead | SequenceHead)


def output_tensors(
    spec: ModelSpec, arrays: list[Array], steps: list[int], requested: Sequence[RequestedOutput], ragged: bool
) -> list[Tensor]:
    """Return the requested outputs in their order, or the head's outputs if the request names none.

    arrays: from `head_outputs.decode_arrays`. steps: the length of each sequence; there is none, and no output, if the request only
    ended a session. ragged: sequences are packed end to end.
    """
    answer = _AnswerTensors(spec, arrays, _SequenceLayout(steps, ragged))
    if not requested:
        names = [tensor.name for tensor in metadata.head_outputs(spec)]
        layout = [OFFSETS if ragged else LENGTHS] if has_step_outputs(spec) else []
        requested = [RequestedOutput(name) for name in (*names, *layout)]
    return [answer.classes(output.classes) if output.classes else answer.tensor(output.name) for output in requested if steps]


@dataclass(frozen=True, slots=True)
class _SequenceLayout:
    """The arrangement of sequences in outputs per time step: padded, or packed end to end (ragged)."""

    steps: list[int]
    ragged: bool

    def arrange(self, values: Array, fill: int = 0) -> Array:
        """Return the packed values (steps, ...) as (1, steps, ...) or padded as (sequences, longest, ...)."""
        if self.ragged:
            return values[None]
        shape = (len(self.steps), max(self.steps), *values.shape[1:])
        if len(values) == shape[0] * shape[1]:
            return values.reshape(shape)
        size = int(np.prod(shape)) * values.itemsize
        if size > MAX_PADDED_BYTES:
            raise TooLarge(
                f"a padded output would have {size} bytes, but at most {MAX_PADDED_BYTES} are allowed: "
                "send the sequences packed end to end, with offsets"
            )
        padded = np.full(shape, fill, values.dtype)
        padded[np.arange(shape[1]) < np.array(self.steps)[:, None]] = values
        return padded


class _AnswerTensors:
    """All outputs of one answer; a tensor is built when it is requested."""

    def __init__(self, spec: ModelSpec, arrays: list[Array], layout: _SequenceLayout) -> None:
        self._head = spec.head
        self._scores, self._picks, self._embedding, self._sequence, state = arrays
        self._states = split_state(spec, state) if state.size else {}
        self._layout = layout

    def tensor(self, name: str) -> Tensor:
        """Return an output by its name."""
        if name.startswith(STATE):
            return _numbers(name, self._states[name.removeprefix(STATE)])
        match name, self._head:
            case "label", ClassifyHead(labels=labels):
                best = self._scores.argmax(axis=1)[:, None]
                return _strings(name, best, labels)
            case "labels", TagHead(labels=labels):
                return _strings(name, self._layout.arrange(self._picks[:, 0], fill=len(labels)), (*labels, ""))
            case "scores", TagHead():
                return _numbers(name, self._layout.arrange(self._scores[:, 0]))
            case "score", ClassifyHead():
                return _numbers(name, self._scores.max(axis=1, keepdims=True))
            case "start" | "end", SpanHead():
                column = ("start", "end").index(name)
                return _numbers(name, self._picks[:, column : column + 1])
            case "ids", NextHead():
                return _numbers(name, self._picks)
            case "embedding", _:
                return _numbers(name, self._embedding)
            case "sequence", _:
                return _numbers(name, self._layout.arrange(self._sequence))
            case "lengths", _:
                return _numbers(name, np.array(self._layout.steps, np.int32)[:, None])
            case "offsets", _:
                return _numbers(name, np.array([[0, *accumulate(self._layout.steps)]], np.int32))
        # scores of classify and next, value of regress, score of span
        return _numbers(name, self._scores)

    def classes(self, count: int) -> Tensor:
        """Return the best labels of each sequence as strings score:index:label, best first."""
        assert isinstance(self._head, ClassifyHead)
        labels = self._head.labels
        best = np.argsort(-self._scores, axis=1, kind="stable")[:, :count]
        lines = [
            b"%b:%d:%b" % (score, index, labels[index].encode())
            for scores, picks in zip(self._scores, best, strict=True)
            for score, index in zip(json_numbers(scores[picks])[1:-1].split(b","), picks.tolist(), strict=True)
        ]
        return Tensor("scores", BYTES, best.shape, lines)


def _numbers(name: str, values: Array) -> Tensor:
    return Tensor(name, "INT32" if values.dtype == np.int32 else "FP32", values.shape, values)


def _strings(name: str, picks: Array, strings: Sequence[str]) -> Tensor:
    encoded = [string.encode() for string in strings]
    return Tensor(name, BYTES, picks.shape, [encoded[pick] for pick in picks.ravel().tolist()])


def _outputs_error(problem: str) -> InvalidInput:
    return InvalidInput(problem, field="outputs")
