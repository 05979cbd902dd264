"""Large answers have the same bytes as small answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.frontend import large_answers
from service.frontend.head_outputs import OutputWriter, decode_arrays, json_numbers, number_pieces
from service.frontend.large_answers import PIECE_BYTES, LargeAnswers
from service.frontend.oip.json import RawOutputs, encode_response, response_pieces
from service.frontend.oip.outputs import output_tensors
from service.frontend.oip.types import InferResponse, RequestedOutput
from service.ipc.messages import Answer
from service.modeling.spec import ModelSpec
from tests import models

STEPS = [3, 1, 70]
WIDTHS = {"words": 3, "forecaster": 2, "tagger": 1, "reader": 1, "speller": 4}
PICKS = {"tagger": 1, "reader": 2, "speller": 4}


def answer_of(spec: ModelSpec, steps: Sequence[int], *, vectors: bool = True) -> tuple[Answer, bytes]:
    """Return random arrays that an engine may return for a model, with every vector that it has."""
    generator, total = np.random.default_rng(5), sum(steps)
    lines, arrays = {"tagger": total}.get(spec.name, len(steps)), {}
    if spec.name in WIDTHS:
        arrays["scores"] = generator.standard_normal((lines, WIDTHS[spec.name])).astype("f4")
    if spec.name in PICKS:
        arrays["picks"] = generator.integers(0, 3, (lines, PICKS[spec.name])).astype("i4")
    if spec.name == "embedder" or (vectors and spec.has_embedding):
        arrays["embedding"] = generator.standard_normal((len(steps), 8)).astype("f4")
    if spec.name == "halver" or (vectors and spec.has_steps):
        arrays["sequence"] = generator.standard_normal((total, 5)).astype("f4")
    shapes: dict[str, Any] = {name: array.shape for name, array in arrays.items()}
    return Answer(steps=list(steps), **shapes), b"".join(array.tobytes() for array in arrays.values())


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_pieces_of_answers_are_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JSON, and over the Open Inference Protocol in JSON and with raw outputs."""
    spec = models.OF_EVERY_HEAD[name](tmp_path)
    writer, (answer, data) = OutputWriter(spec), answer_of(spec, STEPS)
    whole, arrays = writer.write(answer, data), decode_arrays(spec, answer, data)
    for values in (1, 7, 100_000):
        monkeypatch.setattr("service.frontend.head_outputs.PIECE_VALUES", values)
        assert b"".join(writer.pieces(answer, arrays)) == whole
    monkeypatch.setattr("service.frontend.head_outputs.PIECE_VALUES", 7)
    monkeypatch.setattr("service.frontend.oip.json.PIECE_VALUES", 7)
    arrays = decode_arrays(spec, *answer_of(spec, STEPS, vectors=False))
    for raw in (RawOutputs({}, default=False), RawOutputs({}, default=True), RawOutputs({"scores": True}, default=False)):
        for requested in ([], [RequestedOutput("scores", 2)] if name == "words" else []):
            outputs = output_tensors(spec, arrays, STEPS, requested, ragged=False)
            response = InferResponse(name, "1", 'an id with a \n and "outputs":[]', {"sequence_steps": 7}, outputs)
            whole, header_length = encode_response(response, raw)
            pieces = response_pieces(response, raw)
            header = b"".join(pieces.json)
            assert header + b"".join(pieces.tail) == whole
            assert (len(header) if pieces.tail else None) == header_length


@pytest.mark.parametrize("shape", [(0,), (1,), (50,), (0, 3), (3, 0), (50, 3), (1, 40)])
def test_pieces_of_numbers_are_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(6).standard_normal(shape).astype("f4")
    for size in (1, 7, 1000):
        monkeypatch.setattr("service.frontend.head_outputs.PIECE_VALUES", size)
        pieces = list(number_pieces(values))
        assert b"".join(pieces) == json_numbers(values)
        assert size > 1 or values.size < 20 or len(pieces) > values.shape[0]


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_large_answers_are_written_one_at_a_time(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are joined in a thread if they are very large."""
    monkeypatch.setattr(large_answers, "MAX_JOINED_BYTES", limit)
    order: list[str] = []

    def pieces(name: str) -> Iterator[bytes]:
        for _ in range(5):
            order.append(name)
            yield name.encode() * (PIECE_BYTES + 1)

    async def write() -> list[bytes]:
        answers = LargeAnswers()
        return [bytes(answer) for answer in await asyncio.gather(*(answers.join(pieces(name)) for name in "abc"))]

    assert asyncio.run(write()) == [name * 5 * (PIECE_BYTES + 1) for name in (b"a", b"b", b"c")]
    assert order == list(chain.from_iterable([name] * 5 for name in "abc"))
