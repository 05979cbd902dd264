"""An engine's answer as arrays, and as the JSON outputs of a model's head."""

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


class InferOutput(BaseModel):
    """One output of POST /infer. The model's head determines its fields.

    classify: label, score, scores by label. regress: value. tag: labels and scores by step. span: start, end (the last step of the
    span), score. next: ids and scores, most likely first. embed: embedding. sequence: sequence.
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


@dataclass(frozen=True, slots=True)
class _SequenceArrays:
    """The part of an answer that belongs to one sequence.

    scores and picks: (1, n), or (steps, n) for a head that answers for every step. embedding: (width,). sequence: (steps, width).
    """

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
    """Return the name of one input of a request for an error message."""
    return f"inputs[{index}]"


def format_outputs(
    spec: ModelSpec, answer: Answer, data: bytes, field_of: Callable[[int], str] = input_field
) -> list[dict[str, Any]]:
    """Return one JSON output per sequence, in their order; raises InvalidInput as `decode_arrays` does."""
    format_head, arrays = _FORMATS[type(spec.head)], decode_arrays(spec, answer, data, field_of)
    return [format_head(spec.head, part) | _format_vectors(part) for part in _split(spec, answer, arrays)]


def decode_arrays(spec: ModelSpec, answer: Answer, data: bytes, field_of: Callable[[int], str] = input_field) -> list[Array]:
    """Return the scores, picks, embedding and sequence of an answer; an array that the answer lacks is empty.

    Raises InvalidInput for an input that produced values beyond float32.
    """
    start, arrays = 0, []
    for shape, dtype in (
        (answer.scores, FEATURES),
        (answer.picks, IDS),
        (answer.embedding, FEATURES),
        (answer.sequence, FEATURES),
    ):
        count = int(np.prod(shape)) if shape else 0
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape or (0,)))
        start += arrays[-1].nbytes
    if not all(np.isfinite(array).all() for array in arrays if array.size):
        field = field_of(next(index for index, part in enumerate(_split(spec, answer, arrays)) if not part.finite))
        raise InvalidInput(f"{field} drives {spec.name} to values that are not finite: send smaller numbers", field=field)
    return arrays


def shortest_decimals(values: Array) -> list[float]:
    """Return each float32 as the shortest decimal that identifies it: half the bytes of a float64's digits, without loss."""
    return [float(value) for value in values.astype(str)]


def _classify(head: ClassifyHead, part: _SequenceArrays) -> dict[str, Any]:
    scores = shortest_decimals(part.scores[0])
    best = int(part.scores[0].argmax())
    return {"label": head.labels[best], "score": scores[best], "scores": dict(zip(head.labels, scores, strict=True))}


def _regress(head: RegressHead, part: _SequenceArrays) -> dict[str, Any]:
    values = shortest_decimals(part.scores[0])
    return {"value": values[0] if head.outputs == 1 else values}


def _tag(head: TagHead, part: _SequenceArrays) -> dict[str, Any]:
    return {"labels": [head.labels[pick] for pick in part.picks[:, 0]], "scores": shortest_decimals(part.scores[:, 0])}


def _span(head: SpanHead, part: _SequenceArrays) -> dict[str, Any]:
    start, end = part.picks[0].tolist()
    return {"start": start, "end": end, "score": shortest_decimals(part.scores[0])[0]}


def _next(head: NextHead, part: _SequenceArrays) -> dict[str, Any]:
    return {"ids": part.picks[0].tolist(), "scores": shortest_decimals(part.scores[0])}


def _vectors_only(head: EmbedHead | SequenceHead, part: _SequenceArrays) -> dict[str, Any]:
    return {}


_FORMATS: dict[type, Callable[[Any, _SequenceArrays], dict[str, Any]]] = {
    ClassifyHead: _classify,
    RegressHead: _regress,
    TagHead: _tag,
    SpanHead: _span,
    NextHead: _next,
    EmbedHead: _vectors_only,
    SequenceHead: _vectors_only,
}


def _format_vectors(part: _SequenceArrays) -> dict[str, Any]:
    embedding = {} if part.embedding is None else {"embedding": part.embedding.tolist()}
    return embedding | ({} if part.sequence is None else {"sequence": part.sequence.tolist()})


def _split(spec: ModelSpec, answer: Answer, arrays: list[Array]) -> Iterator[_SequenceArrays]:
    """Yield the arrays of each sequence."""
    scores, picks, embedding, sequence = arrays
    per_step = isinstance(spec.head, TagHead)
    for index, (begin, end) in enumerate(pairwise(accumulate(answer.steps, initial=0))):
        part = slice(begin, end) if per_step else slice(index, index + 1)
        yield _SequenceArrays(
            scores[part],
            picks[part],
            embedding[index] if answer.embedding else None,
            sequence[begin:end] if answer.sequence else None,
        )
