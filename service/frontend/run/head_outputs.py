"""An engine's answer as arrays, and as the JSON outputs of a model's head.

Every float32 is written as the shortest decimal that identifies it: half the bytes of a float64's digits, without loss.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, pairwise
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from service.errors import InvalidInput
from service.frontend.run.large_answers import PIECE_VALUES
from service.ipc.blocks import ANSWER_ARRAYS, answer_arrays
from service.ipc.messages.inference import FEATURES, Answer
from service.modeling.spec import ModelSpec
from service.modeling.spec.heads.fields import AnswerField, Extent

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
    present = dict(answer_arrays(answer, data))
    arrays = [present.get(name, _ABSENT) for name in ANSWER_ARRAYS]
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
        self._members = _members(spec)

    def write(self, answer: Answer, data: bytes | memoryview, field_of: Callable[[int], str] = input_field) -> bytes:
        """Return a JSON array with one output per sequence, in their order; raises InvalidInput as `decode_arrays` does."""
        arrays = decode_arrays(self._spec, answer, data, field_of)
        if not answer.steps:
            return b"[]"
        parts = list(_split(self._spec, answer, arrays))
        members = self._members.of_answer(arrays, parts)
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
            for member in (self._members.pieces(part), *self._vectors(part)):
                first = next(member, None)
                if first is not None:
                    yield comma + first
                    yield from member
                    comma = b","
            yield b"}"
            opening = b","
        yield b"]"

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
        size = self._members.row_bytes
        if not size:
            return None
        shapes = {(len(part), len(answer.steps)) for answer, part in answers}
        if shapes != {(size, 1)}:
            return None
        data = b"".join([data for _, data in answers])
        members = self._members.of_rows(np.frombuffer(data, FEATURES).reshape(len(answers), -1), _ABSENT)
        return members and [b"[{%b}]" % member for member in members]


class _Members:
    """Writes the JSON members of a head's answer, without the braces. This class writes none: it serves a head whose answer is a vector.

    row_bytes: the size of a row of scores, if the answer consists of one such row for each sequence; otherwise 0.
    """

    row_bytes = 0

    def of_answer(self, arrays: list[Array], parts: list[_SequenceArrays]) -> list[bytes]:
        """Return the members of each sequence."""
        return [b""] * len(parts)

    def of_rows(self, scores: Array, picks: Array) -> list[bytes] | None:
        """Return the members for each row of (sequences, width) scores and picks, or None if a score is not finite."""
        raise NotImplementedError

    def pieces(self, part: _SequenceArrays) -> Iterator[bytes]:
        """Yield the members of one sequence, in pieces."""
        return iter(())


class _RowMembers(_Members):
    """Writes the members of answers that have one line of numbers for each sequence: each a number, or a list of them."""

    def __init__(self, fields: Sequence[AnswerField]) -> None:
        self._columns = [
            (field.source == "scores", np.s_[:, field.column : field.column + (field.width or 1)]) for field in fields
        ]
        self._template = b",".join(_named(field, b"%b" if field.width is None else b"[%b]") for field in fields)
        if {field.source for field in fields} == {"scores"}:
            self.row_bytes = np.dtype(FEATURES).itemsize * max(field.column + (field.width or 1) for field in fields)

    def of_answer(self, arrays: list[Array], parts: list[_SequenceArrays]) -> list[bytes]:
        return self._of_finite_rows(arrays[0], arrays[1])

    def pieces(self, part: _SequenceArrays) -> Iterator[bytes]:
        return iter(self._of_finite_rows(part.scores, part.picks))

    def _of_finite_rows(self, scores: Array, picks: Array) -> list[bytes]:
        members = self.of_rows(scores, picks)
        assert members is not None, "decode_arrays refuses what is not finite"
        return members

    def of_rows(self, scores: Array, picks: Array) -> list[bytes] | None:
        columns = []
        for is_scores, part in self._columns:
            text = json_numbers((scores if is_scores else picks)[part])
            if b"null" in text:
                return None
            columns.append(text[2:-2].split(b"],["))
        return [self._template % row for row in zip(*columns, strict=True)]


class _LabelScoreMembers(_RowMembers):
    """Writes the members of answers with a score for each label."""

    def __init__(self, fields: Sequence[AnswerField]) -> None:
        super().__init__(fields)
        labels = [orjson.dumps(label) for label in fields[-1].labels]
        self._scores = _named(fields[-1], b"{%b}" % b",".join(b"%b:%%b" % label.replace(b"%", b"%%") for label in labels))
        self._labels = labels

    def of_rows(self, scores: Array, picks: Array) -> list[bytes] | None:
        text = json_numbers(scores)
        return None if b"null" in text else self._write(text[2:-2].split(b"],["), scores)

    @abstractmethod
    def _write(self, rows: list[bytes], scores: Array) -> list[bytes]:
        """Return the members for each row. rows: the JSON numbers of each row of scores."""


class _BestLabelMembers(_LabelScoreMembers):
    """Writes the best label, its score and all scores: a template for each label that may be the best."""

    def __init__(self, fields: Sequence[AnswerField]) -> None:
        super().__init__(fields)
        label, score, _ = fields
        self._templates = [
            b",".join((_named(label, name.replace(b"%", b"%%")), _named(score, b"%b"), self._scores)) for name in self._labels
        ]

    def _write(self, rows: list[bytes], scores: Array) -> list[bytes]:
        members = []
        for row, pick in zip(rows, scores.argmax(axis=1).tolist(), strict=True):
            values = row.split(b",")
            members.append(self._templates[pick] % (values[pick], *values))
        return members


class _ChosenLabelMembers(_LabelScoreMembers):
    """Writes the labels whose scores reach a threshold, and all scores."""

    def __init__(self, fields: Sequence[AnswerField]) -> None:
        super().__init__(fields)
        self._template = b"%b,%b" % (_named(fields[0], b"[%b]"), self._scores)
        self._threshold = fields[0].threshold

    def _write(self, rows: list[bytes], scores: Array) -> list[bytes]:
        chosen = (scores >= self._threshold).tolist()
        labels = [b",".join(compress(self._labels, flags)) for flags in chosen]
        return [self._template % (joined, *row.split(b",")) for joined, row in zip(labels, rows, strict=True)]


class _StepMembers(_Members):
    """Writes the members of answers with a line for each step, each a list."""

    def __init__(self, fields: Sequence[AnswerField]) -> None:
        self._fields = [(field, _named(field, b""), [orjson.dumps(label) for label in field.labels]) for field in fields]

    def of_answer(self, arrays: list[Array], parts: list[_SequenceArrays]) -> list[bytes]:
        return [b"".join(self.pieces(part)) for part in parts]

    def pieces(self, part: _SequenceArrays) -> Iterator[bytes]:
        comma = b""
        for field, name, labels in self._fields:
            yield comma + name
            values = (part.scores if field.source == "scores" else part.picks)[:, field.column]
            yield from _label_pieces(labels, values) if labels else number_pieces(values)
            comma = b","


def _label_pieces(labels: list[bytes], picks: Array) -> Iterator[bytes]:
    """Yield the list of the labels that (steps,) picks choose, in pieces."""
    opening = b"["
    for start in range(0, len(picks), PIECE_VALUES):
        yield opening + b",".join([labels[pick] for pick in picks[start : start + PIECE_VALUES].tolist()])
        opening = b","
    yield b"]" if len(picks) else b"[]"


def _named(field: AnswerField, value: bytes) -> bytes:
    return b"%b:%b" % (orjson.dumps(field.name), value)


def _members(spec: ModelSpec) -> _Members:
    """Return the writer for the fields of a head's answer. Vectors are written like those that a request asks for."""
    fields = [field for field in spec.head.json_fields(spec.output_width) if field.source in ("scores", "picks")]
    if not fields:
        return _Members()
    if spec.answers_steps:
        return _StepMembers(fields)
    if fields[0].extent is Extent.RAGGED:
        return _ChosenLabelMembers(fields)
    return (_BestLabelMembers if fields[0].best else _RowMembers)(fields)


def split_state(spec: ModelSpec, state: Array) -> dict[str, Array]:
    """Return a model's states by name. state: (..., numbers), joined in their order."""
    widths = spec.states
    parts = np.split(state, list(accumulate(widths.values()))[:-1], axis=-1)
    return dict(zip(widths, parts, strict=True))


def _split(spec: ModelSpec, answer: Answer, arrays: list[Array]) -> Iterator[_SequenceArrays]:
    """Yield the arrays of each sequence."""
    scores, picks, embedding, sequence, state = arrays
    per_step = spec.answers_steps
    for index, (begin, end) in enumerate(pairwise(accumulate(answer.steps, initial=0))):
        part = slice(begin, end) if per_step else slice(index, index + 1)
        yield _SequenceArrays(
            scores[part],
            picks[part],
            embedding[index] if answer.embedding else None,
            sequence[begin:end] if answer.sequence else None,
            state[index] if answer.state else None,
        )
