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
from service.frontend.oip import metadata
from service.frontend.oip.limits import MAX_CLASSES
from service.frontend.oip.metadata import LENGTHS, OFFSETS, STATE, state_tensors
from service.frontend.oip.tensors import BYTES, Tensor
from service.frontend.oip.types import RequestedOutput
from service.frontend.run.head_outputs import json_numbers, split_state
from service.frontend.run.quoting import quote
from service.modeling.spec import ModelSpec
from service.modeling.spec.heads.fields import AnswerField, Extent

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
    classified = _label_scores(spec)
    for index, output in enumerate(outputs):
        if output.name not in known:
            raise _outputs_error(f"{quote(output.name)} is not an output of {spec.name}: its outputs are {', '.join(known)}")
        if output.name in names[:index]:
            raise _outputs_error(f"{output.name} is requested twice: request it once")
        if output.classes and not (classified and output.name == classified.name):
            raise _outputs_error(f"{output.name} of {spec.name} has no classes: leave classification out")
    if not spec.answers_steps and {LENGTHS, OFFSETS} & set(names) and "sequence" not in names:
        raise _outputs_error(f"{LENGTHS} and {OFFSETS} describe sequence: request sequence too, or leave them out")


def check_classes(outputs: Sequence[RequestedOutput], spec: ModelSpec, sequences: int) -> None:
    """Raise TooLarge for a classification with too many entries, over all sequences."""
    classified = _label_scores(spec) if outputs else None
    if classified is None:
        return
    for output in outputs:
        entries = min(output.classes, len(classified.labels)) * sequences
        if entries > MAX_CLASSES:
            raise TooLarge(
                f"the classification would have {entries} entries for {sequences} sequences, but at most {MAX_CLASSES} are "
                "allowed: ask for fewer classes, or for all scores without classification",
                field="outputs",
            )


def _label_scores(spec: ModelSpec) -> AnswerField | None:
    """Return the output that has a score for each label. A request may ask for the best labels of this output."""
    return next((field for field in spec.answer_fields if field.has_label_scores), None)


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
        layout = [OFFSETS if ragged else LENGTHS] if spec.answers_steps else []
        requested = [RequestedOutput(name) for name in (*names, *layout)]
    return [answer.classes(output) if output.classes else answer.tensor(output.name) for output in requested if steps]


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
        *vectors, state = arrays
        self._arrays = dict(zip(("scores", "picks", "embedding", "sequence"), vectors, strict=True))
        self._fields = {field.name: field for field in spec.answer_fields}
        self._states = split_state(spec, state) if state.size else {}
        self._layout = layout

    def tensor(self, name: str) -> Tensor:
        """Return an output by its name."""
        if name.startswith(STATE):
            return _numbers(name, self._states[name.removeprefix(STATE)])
        if name in self._fields:
            return self._head_output(self._fields[name])
        match name:
            case "embedding":
                return _numbers(name, self._arrays[name])
            case "sequence":
                return _numbers(name, self._layout.arrange(self._arrays[name]))
            case "lengths":
                return _numbers(name, np.array(self._layout.steps, np.int32)[:, None])
        return _numbers(name, np.array([[0, *accumulate(self._layout.steps)]], np.int32))  # offsets

    def _head_output(self, field: AnswerField) -> Tensor:
        values, labels = self._arrays[field.source], field.labels
        if field.best:
            values = values.argmax(axis=1)[:, None] if field.dtype == BYTES else values.max(axis=1, keepdims=True)
        elif field.extent is Extent.ROW:
            values = values[:, field.column : field.column + (field.width or 1)]
        else:  # padding has the string after the labels
            values = values[:, field.column] if field.width is None else values
            values, labels = self._layout.arrange(values, fill=len(labels)), (*labels, "")
        return _strings(field.name, values, labels) if field.dtype == BYTES else _numbers(field.name, values)

    def classes(self, output: RequestedOutput) -> Tensor:
        """Return the best labels of each sequence as strings score:index:label, best first."""
        field = self._fields[output.name]
        scores = self._arrays[field.source]
        best = np.argsort(-scores, axis=1, kind="stable")[:, : output.classes]
        lines = [
            b"%b:%d:%b" % (score, index, field.labels[index].encode())
            for row, picks in zip(scores, best, strict=True)
            for score, index in zip(json_numbers(row[picks])[1:-1].split(b","), picks.tolist(), strict=True)
        ]
        return Tensor(output.name, BYTES, best.shape, lines)


def _numbers(name: str, values: Array) -> Tensor:
    return Tensor(name, "INT32" if values.dtype == np.int32 else "FP32", values.shape, values)


def _strings(name: str, picks: Array, strings: Sequence[str]) -> Tensor:
    encoded = [string.encode() for string in strings]
    return Tensor(name, BYTES, picks.shape, [encoded[pick] for pick in picks.ravel().tolist()])


def _outputs_error(problem: str) -> InvalidInput:
    return InvalidInput(problem, field="outputs")
