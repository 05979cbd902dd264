"""An engine's answer as arrays, and as the JSON outputs of a model's head.

Every float32 is written as the shortest decimal that identifies it: half the bytes of a float64's digits, without loss.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, pairwise
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from service.errors import InvalidInput
from service.frontend.large_answers import PIECE_VALUES
from service.ipc.messages import FEATURES, IDS, Answer
from service.modeling.spec import ModelSpec
from service.modeling.spec.heads import ClassifyHead, EmbedHead, NextHead, RegressHead, SequenceHead, SpanHead, TagHead

Array = NDArray[Any]
_ABSENT: Array = np.empty(0, FEATURES)


class InferOutput(BaseModel):
    """One output of POST /infer. The model's head determines its fields.

    classify: label, score, scores by label; of a head that may choose several labels: labels, scores by label. regress: value. tag: labels
    and scores by step. span: start, end (the last step of the span), score. next: ids and scores, most likely first. embed: embedding.
    sequence: sequence.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    label: str | None = None
    score: float | None = None
    scores: dict[str, float] | list[float] | None = None
    value: float | list[float] | None = None
    labels: list[str] | None = None
    start: int | None = None
    end: int | None = None
    ids: list[int] | None = None
    embedding: list[float] | None = None
    """The pooled vector before the head."""
    sequence: list[list[float]] | None = None
    """The encoder's vector of every step."""
    state: dict[str, list[float]] | None = None
    """The states of the recurrent layers after the sequence, by name."""


@dataclass(frozen=True, slots=True)
class _SequenceArrays:
    """The part of an answer that belongs to one sequence.

    scores and picks: (1, n), or (steps, n) for a head that answers for every step. embedding: (width,). sequence: (steps, width). state:
    (numbers,), the model's states, joined in their order.
    """

    scores: Array
    picks: Array
    embedding: Array | None
    sequence: Array | None
    state: Array | None

    @property
    def finite(self) -> bool:
        arrays = self.scores, self.embedding, self.sequence, self.state
        return all(bool(np.isfinite(array).all()) for array in arrays if array is not None)


def input_field(index: int) -> str:
    """Return the name of one input of a request for an error message."""
    return f"inputs[{index}]"


def decode_arrays(
    spec: ModelSpec, answer: Answer, data: bytes | memoryview, field_of: Callable[[int], str] = input_field
) -> list[Array]:
    """Return the scores, picks, embedding, sequence and state of an answer; an array that the answer lacks is empty.

    Raises InvalidInput for an input that produced values beyond float32.
    """
    if not answer.finite:
        raise _not_finite(spec, field_of(0))
    start, arrays = 0, []
    for shape, dtype in (
        (answer.scores, FEATURES),
        (answer.picks, IDS),
        (answer.embedding, FEATURES),
        (answer.sequence, FEATURES),
        (answer.state, FEATURES),
    ):
        if not shape:
            arrays.append(_ABSENT)
            continue
        arrays.append(np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape))
        start += arrays[-1].nbytes
    if not all(np.isfinite(array).all() for array in arrays if array.size):
        wrong = next(index for index, part in enumerate(_split(spec, answer, arrays)) if not part.finite)
        raise _not_finite(spec, field_of(wrong))
    return arrays


def _not_finite(spec: ModelSpec, field: str) -> InvalidInput:
    return InvalidInput(f"{field} drives {spec.name} to values that are not finite: send smaller numbers", field=field)


def json_numbers(values: Array) -> bytes:
    """Return an array of float32 or int32 as JSON, nested like its shape; numbers that are not finite become null."""
    return orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY)


def number_pieces(values: Array) -> Iterator[bytes]:
    """Yield what `json_numbers` returns, in pieces of about PIECE_VALUES numbers. values: with at least one dimension."""
    rows = max(1, PIECE_VALUES * len(values) // max(1, values.size))
    opening = b"["
    for start in range(0, len(values), rows):
        yield opening + json_numbers(values[start : start + rows])[1:-1]
        opening = b","
    yield b"]" if len(values) else b"[]"


class OutputWriter:
    """Writes the answers of one model as JSON. Everything that does not depend on the answer is prepared here."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._members = _MEMBERS[type(spec.head)](spec.head)

    def write(self, answer: Answer, data: bytes | memoryview, field_of: Callable[[int], str] = input_field) -> bytes:
        """Return a JSON array with one output per sequence, in their order; raises InvalidInput as `decode_arrays` does."""
        arrays = decode_arrays(self._spec, answer, data, field_of)
        if not answer.steps:
            return b"[]"
        parts = list(_split(self._spec, answer, arrays))
        members = self._members(parts)
        return b"[%b]" % b",".join(
            b"{%b}" % b",".join([*filter(None, (member,)), *map(b"".join, self._vectors(part))])
            for member, part in zip(members, parts, strict=True)
        )

    def pieces(self, answer: Answer, arrays: list[Array]) -> Iterator[bytes]:
        """Yield what `write` returns, in pieces. arrays: from `decode_arrays`."""
        opening = b"["
        for part in _split(self._spec, answer, arrays):
            yield opening + b"{"
            comma = b""
            for member in (self._member_pieces(part), *self._vectors(part)):
                first = next(member, None)
                if first is not None:
                    yield comma + first
                    yield from member
                    comma = b","
            yield b"}"
            opening = b","
        yield b"]"

    def _member_pieces(self, part: _SequenceArrays) -> Iterator[bytes]:
        if isinstance(self._members, _TagMembers):
            return self._members.pieces(part)
        return filter(None, self._members([part]))

    def _vectors(self, part: _SequenceArrays) -> Iterator[Iterator[bytes]]:
        """Yield the JSON members of the vectors that a request asks for, each in pieces."""
        if part.embedding is not None:
            yield chain([b'"embedding":'], number_pieces(part.embedding))
        if part.sequence is not None:
            yield chain([b'"sequence":'], number_pieces(part.sequence))
        if part.state is not None:
            states = split_state(self._spec, part.state).items()
            members = [b"%b:%b" % (orjson.dumps(name), json_numbers(values)) for name, values in states]
            yield iter([b'"state":{%b}' % b",".join(members)])

    def write_all(self, answers: Sequence[tuple[Answer, bytes | memoryview]]) -> list[bytes] | None:
        """Return what `write` returns for each of several answers, or None if they are not simple enough to be written together.

        Simple are answers of one sequence each that consist of finite scores by label, or of finite values.
        """
        if not isinstance(self._members, _RowMembers):
            return None
        size = self._members.row_bytes
        shapes = {(len(part), len(answer.steps)) for answer, part in answers}
        if shapes != {(size, 1)}:
            return None
        data = b"".join([data for _, data in answers])
        members = self._members.of_scores(np.frombuffer(data, FEATURES).reshape(len(answers), -1))
        return members and [b"[{%b}]" % member for member in members]


class _RowMembers(ABC):
    """Writes the members of outputs that consist of one row of scores for each sequence."""

    def __init__(self, width: int) -> None:
        """width: scores in a row."""
        self.row_bytes = np.dtype(FEATURES).itemsize * width

    def __call__(self, parts: list[_SequenceArrays]) -> list[bytes]:
        members = self.of_scores(np.concatenate([part.scores for part in parts]))
        assert members is not None, "decode_arrays refuses what is not finite"
        return members

    def of_scores(self, scores: Array) -> list[bytes] | None:
        """Return the members for each row of (sequences, width) scores, or None if a score is not finite."""
        text = json_numbers(scores)
        return None if b"null" in text else self._write(text[2:-2].split(b"],["), scores)

    @abstractmethod
    def _write(self, rows: list[bytes], scores: Array) -> list[bytes]:
        """Return the members for each row. rows: the JSON numbers of each row of scores."""


class _ClassifyMembers(_RowMembers):
    """Writes the members of classify outputs: a template for each label that may be the best."""

    def __init__(self, head: ClassifyHead) -> None:
        super().__init__(len(head.labels))
        labels = [orjson.dumps(label).replace(b"%", b"%%") for label in head.labels]
        scores = b",".join(b"%b:%%b" % label for label in labels)
        self._templates = [b'"label":%b,"score":%%b,"scores":{%b}' % (label, scores) for label in labels]

    def _write(self, rows: list[bytes], scores: Array) -> list[bytes]:
        members = []
        for row, pick in zip(rows, scores.argmax(axis=1).tolist(), strict=True):
            values = row.split(b",")
            members.append(self._templates[pick] % (values[pick], *values))
        return members


class _MultiLabelMembers(_RowMembers):
    """Writes the members of classify outputs that may have several labels."""

    def __init__(self, head: ClassifyHead) -> None:
        super().__init__(len(head.labels))
        self._labels = [orjson.dumps(label) for label in head.labels]
        self._template = b'"labels":[%%b],"scores":{%b}' % b",".join(
            b"%b:%%b" % label.replace(b"%", b"%%") for label in self._labels
        )
        self._threshold = head.threshold

    def _write(self, rows: list[bytes], scores: Array) -> list[bytes]:
        chosen = (scores >= self._threshold).tolist()
        labels = [b",".join(compress(self._labels, flags)) for flags in chosen]
        return [self._template % (joined, *row.split(b",")) for joined, row in zip(labels, rows, strict=True)]


def _classify(head: ClassifyHead) -> _RowMembers:
    return _MultiLabelMembers(head) if head.multi_label else _ClassifyMembers(head)


class _RegressMembers(_RowMembers):
    """Writes the members of regress outputs."""

    def __init__(self, head: RegressHead) -> None:
        super().__init__(head.outputs)
        self._template = b'"value":%b' if head.outputs == 1 else b'"value":[%b]'

    def _write(self, rows: list[bytes], scores: Array) -> list[bytes]:
        return [self._template % row for row in rows]


class _TagMembers:
    """Writes the members of tag outputs."""

    def __init__(self, head: TagHead) -> None:
        self._labels = [orjson.dumps(label) for label in head.labels]

    def __call__(self, parts: list[_SequenceArrays]) -> list[bytes]:
        return [b"".join(self.pieces(part)) for part in parts]

    def pieces(self, part: _SequenceArrays) -> Iterator[bytes]:
        picks, opening = part.picks[:, 0], b""
        yield b'"labels":['
        for start in range(0, len(picks), PIECE_VALUES):
            labels = [self._labels[pick] for pick in picks[start : start + PIECE_VALUES].tolist()]
            yield opening + b",".join(labels)
            opening = b","
        yield b'],"scores":'
        yield from number_pieces(part.scores[:, 0])


def _span(head: SpanHead) -> _Members:
    def members(part: _SequenceArrays) -> bytes:
        start, end = part.picks[0].tolist()
        return b'"start":%d,"end":%d,"score":%b' % (start, end, json_numbers(part.scores[0])[1:-1])

    return lambda parts: [members(part) for part in parts]


def _next(head: NextHead) -> _Members:
    return lambda parts: [
        b'"ids":%b,"scores":%b' % (json_numbers(part.picks[0]), json_numbers(part.scores[0])) for part in parts
    ]


def _vectors_only(head: EmbedHead | SequenceHead) -> _Members:
    return lambda parts: [b""] * len(parts)


_Members = Callable[[list[_SequenceArrays]], list[bytes]]
"""Returns the JSON members of a head's output for each sequence, without the braces."""
_MEMBERS: dict[type, Callable[[Any], _Members]] = {
    ClassifyHead: _classify,
    RegressHead: _RegressMembers,
    TagHead: _TagMembers,
    SpanHead: _span,
    NextHead: _next,
    EmbedHead: _vectors_only,
    SequenceHead: _vectors_only,
}


def split_state(spec: ModelSpec, state: Array) -> dict[str, Array]:
    """Return a model's states by name. state: (..., numbers), joined in their order."""
    widths = spec.states
    parts = np.split(state, list(accumulate(widths.values()))[:-1], axis=-1)
    return dict(zip(widths, parts, strict=True))


def _split(spec: ModelSpec, answer: Answer, arrays: list[Array]) -> Iterator[_SequenceArrays]:
    """Yield the arrays of each sequence."""
    scores, picks, embedding, sequence, state = arrays
    per_step = isinstance(spec.head, TagHead)
    for index, (begin, end) in enumerate(pairwise(accumulate(answer.steps, initial=0))):
        part = slice(begin, end) if per_step else slice(index, index + 1)
        yield _SequenceArrays(
            scores[part],
            picks[part],
            embedding[index] if answer.embedding else None,
            sequence[begin:end] if answer.sequence else None,
            state[index] if answer.state else None,
        )
