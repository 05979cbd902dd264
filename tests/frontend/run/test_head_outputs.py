"""The JSON outputs of every kind of head, from arrays that the tests define. Large answers have the same bytes as small answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.errors import InvalidInput
from service.frontend.oip.json import encode_response, response_pieces
from service.frontend.oip.outputs import output_tensors
from service.frontend.oip.types import InferResponse, RequestedOutput
from service.frontend.run import large_answers
from service.frontend.run.head_outputs import InferOutput, OutputWriter, decode_arrays, json_numbers, number_pieces
from service.frontend.run.large_answers import PIECE_BYTES, LargeAnswers
from service.ipc.messages.inference import FEATURES, IDS, Answer, Request, Returns
from service.modeling.spec import ModelSpec
from tests import models
from tests.frontend.in_process import arrays_of

LABELS = ["near", "far", "unknown"]
CLASSIFY = {"kind": "classify", "pool": "max", "labels": LABELS}
TAG = {"kind": "tag", "labels": LABELS}
REGRESS = {"kind": "regress", "pool": "last"}
Rows = Sequence[Sequence[float]]


def spec(**head: Any) -> ModelSpec:
    tables = {
        "name": "test",
        "precision": "float32",
        "input": {"kind": "ids", "vocabulary": 13, "max_steps": 64},
        "layers": [{"kind": "embedding", "width": 6}, {"kind": "lstm", "hidden": 2}],
        "head": head,
    }
    return ModelSpec.model_validate(tables)


def outputs_of(head: dict[str, Any], steps: Sequence[int], **rows: Rows) -> list[dict[str, Any]]:
    """Return the outputs of an answer with these arrays, in their order; an omitted array has no shape."""
    arrays = {name: np.array(values, IDS if name == "picks" else FEATURES) for name, values in rows.items()}
    shapes: dict[str, Any] = {name: array.shape for name, array in arrays.items()}
    data = b"".join(array.tobytes() for array in arrays.values())
    outputs: list[dict[str, Any]] = json.loads(OutputWriter(spec(**head)).write(Answer(**shapes, steps=list(steps)), data))
    assert all(set(output) <= set(InferOutput.model_fields) for output in outputs)
    return outputs


CASES: list[tuple[dict[str, Any], dict[str, Rows], list[dict[str, Any]]]] = [
    (
        CLASSIFY,
        {"scores": [[0.125, 0.75, 0.125], [0.5, 0.25, 0.25]]},
        [
            {"label": "far", "score": 0.75, "scores": {"near": 0.125, "far": 0.75, "unknown": 0.125}},
            {"label": "near", "score": 0.5, "scores": {"near": 0.5, "far": 0.25, "unknown": 0.25}},
        ],
    ),
    (REGRESS, {"scores": [[-2.5], [7.0]]}, [{"value": -2.5}, {"value": 7.0}]),
    ({**REGRESS, "outputs": 2}, {"scores": [[-2.5, 0.25], [0, 1]]}, [{"value": [-2.5, 0.25]}, {"value": [0.0, 1.0]}]),
    (
        TAG,
        {"scores": [[0.5], [0.75], [1.0]], "picks": [[0], [2], [1]]},
        [{"labels": ["near"], "scores": [0.5]}, {"labels": ["unknown", "far"], "scores": [0.75, 1.0]}],
    ),
    (
        {"kind": "span"},
        {"scores": [[0.25], [1.0]], "picks": [[3, 7], [0, 0]]},
        [{"start": 3, "end": 7, "score": 0.25}, {"start": 0, "end": 0, "score": 1.0}],
    ),
    (
        {"kind": "next", "top": 2},
        {"scores": [[0.5, 0.25], [0.75, 0.125]], "picks": [[12, 0], [3, 4]]},
        [{"ids": [12, 0], "scores": [0.5, 0.25]}, {"ids": [3, 4], "scores": [0.75, 0.125]}],
    ),
    ({"kind": "embed", "pool": "mean"}, {}, [{}, {}]),
    ({"kind": "sequence"}, {}, [{}, {}]),
]


@pytest.mark.parametrize("returned", [(), ("embedding",), ("sequence",), ("embedding", "sequence")], ids=str)
@pytest.mark.parametrize("head, arrays, outputs", CASES, ids=[head["kind"] for head, _, _ in CASES])
def test_output_has_the_fields_of_its_head_and_returned_vectors(
    head: dict[str, Any], arrays: dict[str, Rows], outputs: list[dict[str, Any]], returned: tuple[str, ...]
) -> None:
    """The first sequence has one step, the second has two."""
    rows: dict[str, Rows] = {"embedding": [[1.0, 2.0], [3.0, 4.0]], "sequence": [[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]}
    vectors: dict[str, list[Any]] = {
        "embedding": [[1.0, 2.0], [3.0, 4.0]],
        "sequence": [[[5.0, 6.0]], [[7.0, 8.0], [9.0, 10.0]]],
    }
    found = outputs_of(head, [1, 2], **arrays, **{name: rows[name] for name in returned})
    assert found == [output | {name: vectors[name][place] for name in returned} for place, output in enumerate(outputs)]


def test_score_is_the_shortest_decimal_of_its_float32() -> None:
    third = float(np.float32(1 / 3))
    [outputs] = outputs_of({**REGRESS, "outputs": 4}, [1], scores=[[third, 0.1, 1e-30, 3e38]])
    assert outputs["value"] == [0.33333334, 0.1, 1e-30, 3e38]
    assert float(np.float32(outputs["value"][0])) == third


@pytest.mark.parametrize(
    "head", [*(CLASSIFY, {**CLASSIFY, "labels": ["50 %", 'a "quote"', "日本"]}), *(REGRESS, {**REGRESS, "outputs": 3})]
)
def test_answers_written_together_equal_those_written_alone(head: dict[str, Any]) -> None:
    writer, width = OutputWriter(spec(**head)), len(head.get("labels", ())) or head.get("outputs", 1)
    rows = np.random.default_rng(0).dirichlet(np.linspace(0.1, 3.0, width), 50).astype(FEATURES)
    answers = [(Answer((1, width), steps=[4]), row.tobytes()) for row in rows]
    together = writer.write_all(answers)
    assert together is not None and together == [writer.write(answer, data) for answer, data in answers]
    for [output], row in zip(map(json.loads, together), rows, strict=True):
        assert head is REGRESS or "outputs" in head or list(output["scores"]) == head["labels"]
        values = list(output["scores"].values()) if "scores" in output else output["value"]
        assert np.array_equal(np.array(values, FEATURES).reshape(-1), row)
    assert writer.write_all([answers[0], (answers[1][0], (rows[1] * np.inf).tobytes())]) is None


def test_answers_that_differ_in_form_are_not_written_together() -> None:
    writer, row = OutputWriter(spec(**CLASSIFY)), np.array([0.5, 0.25, 0.25], FEATURES)
    plain = (Answer((1, 3), steps=[4]), row.tobytes())
    two = (Answer((2, 3), steps=[4, 1]), row.tobytes() * 2)
    vector = (Answer((1, 3), embedding=(1, 2), steps=[4]), row.tobytes() + bytes(8))
    refused = (Answer(finite=False), b"")
    assert writer.write_all([plain, plain])
    for answer in (two, vector, refused):
        assert writer.write_all([plain, answer]) is None
    assert OutputWriter(spec(**TAG)).write_all([(Answer((1, 1), steps=[1]), bytes(4))]) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_input_with_a_result_that_is_not_finite_is_named(value: float) -> None:
    with pytest.raises(InvalidInput, match="not finite") as raised:
        outputs_of(REGRESS, [2, 3], scores=[[1.0], [value]])
    assert raised.value.field == "inputs[1]"
    with pytest.raises(InvalidInput, match="not finite"):
        outputs_of({"kind": "sequence"}, [1, 1], sequence=[[value, 0.0], [0.0, 0.0]])


def test_chunk_that_the_engine_refuses_as_not_finite_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^chunk drives .* to values that are not finite: send smaller numbers$") as raised:
        OutputWriter(spec(**REGRESS)).write(Answer(finite=False), b"", lambda _: "chunk")
    assert raised.value.field == "chunk"


# Large answers.

STEPS = [3, 1, 70]


def answer_of(spec: ModelSpec, returns: Returns) -> tuple[Answer, bytes]:
    """Return arrays that an engine may return for sequences of STEPS."""
    request = Request(spec.name, "1", STEPS, 0.0, 0.0, returns=returns)
    arrays = arrays_of(spec, request, [[number * 7 + step for step in range(steps)] for number, steps in enumerate(STEPS)])
    shapes: dict[str, Any] = {name: array.shape for name, array in arrays.items()}
    return Answer(steps=STEPS, **shapes), b"".join(array.tobytes() for array in arrays.values())


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_pieces_of_answers_are_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JSON, and over the Open Inference Protocol in JSON and with raw outputs."""
    spec = models.OF_EVERY_HEAD[name](tmp_path)
    writer, (answer, data) = OutputWriter(spec), answer_of(spec, Returns(spec.has_embedding, spec.has_steps))
    whole, arrays = writer.write(answer, data), decode_arrays(spec, answer, data)
    for values in (1, 7, 100_000):
        monkeypatch.setattr("service.frontend.run.head_outputs.PIECE_VALUES", values)
        assert b"".join(writer.pieces(answer, arrays)) == whole
    monkeypatch.setattr("service.frontend.run.head_outputs.PIECE_VALUES", 7)
    monkeypatch.setattr("service.frontend.oip.json.PIECE_VALUES", 7)
    arrays = decode_arrays(spec, *answer_of(spec, Returns()))
    for raw in (lambda _: False, lambda _: True, "scores".__eq__):
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
        monkeypatch.setattr("service.frontend.run.head_outputs.PIECE_VALUES", size)
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
