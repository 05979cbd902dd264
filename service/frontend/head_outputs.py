"""The arrays of an answer as plain values, in the words of the model's head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from service.errors import InvalidInput
from service.ipc.messages import FEATURES, IDS, Answer
from service.modeling.spec import ClassifyHead, EmbedHead, ModelSpec, NextHead, RegressHead, SequenceHead, SpanHead, TagHead

Array = NDArray[Any]


class Output(BaseModel):
    """One output of POST /infer; which fields it has, the model's head says.

    classify: label, score, scores by label. regress: value. tag: labels and scores by step. span: start, end (the last step of the
    span), score. next: ids and scores, the likeliest first. embed: embedding. sequence: sequence.
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
    """The vector under the head."""
    sequence: list[list[float]] | None = None
    """The encoder's vector of every step."""


@dataclass(frozen=True, slots=True)
class _Line:
    """What belongs to one sequence: scores and picks (lines, n), embedding (width,), sequence (steps, width)."""

    scores: Array
    picks: Array
    embedding: Array | None
    sequence: Array | None

    @property
    def finite(self) -> bool:
        return all(
            bool(np.isfinite(array).all()) for array in (self.scores, self.embedding, self.sequence) if array is not None
        )


def input_field(index: int) -> str:
    """How an error names one of the inputs of a request."""
    return f"inputs[{index}]"


def outputs(spec: ModelSpec, answer: Answer, data: bytes, field_of: Callable[[int], str] = input_field) -> list[dict[str, Any]]:
    """One output per sequence, in their order; raises InvalidInput for a sequence that drove the model beyond float32."""
    say, found = _SAYINGS[type(spec.head)], arrays(spec, answer, data, field_of)
    return [say(spec.head, line) | _extras(line) for line in _lines(spec, answer, found)]


def arrays(spec: ModelSpec, answer: Answer, data: bytes, field_of: Callable[[int], str] = input_field) -> list[Array]:
    """Scores, picks, embedding and sequence; what there is not is empty. Raises InvalidInput as `outputs` does."""
    at, found = 0, []
    for shape, dtype in (
        (answer.scores, FEATURES),
        (answer.picks, IDS),
        (answer.embedding, FEATURES),
        (answer.sequence, FEATURES),
    ):
        count = int(np.prod(shape)) if shape else 0
        found.append(np.frombuffer(data, dtype, count, at).reshape(shape or (0,)))
        at += found[-1].nbytes
    if not all(np.isfinite(array).all() for array in found if array.size):
        field = field_of(next(index for index, line in enumerate(_lines(spec, answer, found)) if not line.finite))
        raise InvalidInput(f"{field} drives {spec.name} to values that are not finite: send smaller numbers", field=field)
    return found


def shortest(values: Array) -> list[float]:
    """The shortest decimals that stand for each float32: half the bytes of a float64's, and nothing is lost."""
    return [float(value) for value in values.astype(str)]


def _classify(head: ClassifyHead, line: _Line) -> dict[str, Any]:
    scores = shortest(line.scores[0])
    best = int(line.scores[0].argmax())
    return {"label": head.labels[best], "score": scores[best], "scores": dict(zip(head.labels, scores, strict=True))}


def _regress(head: RegressHead, line: _Line) -> dict[str, Any]:
    values = shortest(line.scores[0])
    return {"value": values[0] if head.outputs == 1 else values}


def _tag(head: TagHead, line: _Line) -> dict[str, Any]:
    return {"labels": [head.labels[pick] for pick in line.picks[:, 0]], "scores": shortest(line.scores[:, 0])}


def _span(head: SpanHead, line: _Line) -> dict[str, Any]:
    start, end = line.picks[0].tolist()
    return {"start": start, "end": end, "score": shortest(line.scores[0])[0]}


def _next(head: NextHead, line: _Line) -> dict[str, Any]:
    return {"ids": line.picks[0].tolist(), "scores": shortest(line.scores[0])}


def _nothing(head: EmbedHead | SequenceHead, line: _Line) -> dict[str, Any]:
    """The vectors are the answer."""
    return {}


_SAYINGS: dict[type, Callable[[Any, _Line], dict[str, Any]]] = {
    ClassifyHead: _classify,
    RegressHead: _regress,
    TagHead: _tag,
    SpanHead: _span,
    NextHead: _next,
    EmbedHead: _nothing,
    SequenceHead: _nothing,
}


def _extras(line: _Line) -> dict[str, Any]:
    embedding = {} if line.embedding is None else {"embedding": line.embedding.tolist()}
    return embedding | ({} if line.sequence is None else {"sequence": line.sequence.tolist()})


def _lines(spec: ModelSpec, answer: Answer, found: list[Array]) -> Iterator[_Line]:
    """The arrays sequence by sequence."""
    scores, picks, embedding, sequence = found
    per_step = isinstance(spec.head, TagHead)
    for row, (begin, end) in enumerate(pairwise(accumulate(answer.steps, initial=0))):
        lines = slice(begin, end) if per_step else slice(row, row + 1)
        yield _Line(
            scores[lines],
            picks[lines],
            embedding[row] if answer.embedding else None,
            sequence[begin:end] if answer.sequence else None,
        )
