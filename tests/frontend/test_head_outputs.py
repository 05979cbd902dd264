"""The JSON outputs of every kind of head, from arrays that the tests define."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from service.errors import InvalidInput
from service.frontend.head_outputs import InferOutput, OutputWriter
from service.ipc.messages import FEATURES, IDS, Answer
from service.modeling.spec import ModelSpec

LABELS = ["near", "far", "unknown"]
CLASSIFY = {"kind": "classify", "pool": "max", "labels": LABELS}
TAG = {"kind": "tag", "labels": LABELS}
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


def outputs_of(
    head: dict[str, Any],
    steps: Sequence[int],
    *,
    scores: Rows = (),
    picks: Rows = (),
    embedding: Rows = (),
    sequence: Rows = (),
) -> list[dict[str, Any]]:
    """Return the outputs of an answer with these arrays; an omitted array has no shape."""
    arrays_by_name = {"scores": (scores, FEATURES), "picks": (picks, IDS), "embedding": (embedding, FEATURES)}
    arrays = {
        name: np.array(rows, dtype) for name, (rows, dtype) in {**arrays_by_name, "sequence": (sequence, FEATURES)}.items()
    }
    held = {name: array for name, array in arrays.items() if len(array)}
    shapes: dict[str, Any] = {name: array.shape for name, array in held.items()}
    answer = Answer(**shapes, steps=list(steps))
    written = OutputWriter(spec(**head)).write(answer, b"".join(array.tobytes() for array in held.values()))
    outputs: list[dict[str, Any]] = json.loads(written)
    assert all(set(output) <= set(InferOutput.model_fields) for output in outputs)
    return outputs


def test_classify_has_the_best_label_and_all_scores() -> None:
    first, second = outputs_of(CLASSIFY, [4, 1], scores=[[0.125, 0.75, 0.125], [0.5, 0.25, 0.25]])
    assert first == {"label": "far", "score": 0.75, "scores": {"near": 0.125, "far": 0.75, "unknown": 0.125}}
    assert second == {"label": "near", "score": 0.5, "scores": {"near": 0.5, "far": 0.25, "unknown": 0.25}}


def test_regress_has_a_number_or_a_list_of_numbers() -> None:
    regress = {"kind": "regress", "pool": "last"}
    assert outputs_of(regress, [3, 1], scores=[[-2.5], [7.0]]) == [{"value": -2.5}, {"value": 7.0}]
    assert outputs_of({**regress, "outputs": 2}, [3], scores=[[-2.5, 0.25]]) == [{"value": [-2.5, 0.25]}]


def test_tag_has_a_label_and_a_score_for_every_step() -> None:
    outputs = outputs_of(
        TAG, [2, 1, 3], scores=[[0.5], [0.75], [1.0], [0.25], [0.5], [0.125]], picks=[[0], [2], [1], [1], [0], [2]]
    )
    assert outputs == [
        {"labels": ["near", "unknown"], "scores": [0.5, 0.75]},
        {"labels": ["far"], "scores": [1.0]},
        {"labels": ["far", "near", "unknown"], "scores": [0.25, 0.5, 0.125]},
    ]


def test_span_has_first_step_last_step_and_score() -> None:
    outputs = outputs_of({"kind": "span"}, [9, 1], scores=[[0.25], [1.0]], picks=[[3, 7], [0, 0]])
    assert outputs == [{"start": 3, "end": 7, "score": 0.25}, {"start": 0, "end": 0, "score": 1.0}]


def test_next_has_token_ids_and_scores_best_first() -> None:
    outputs = outputs_of({"kind": "next", "top": 2}, [5, 2], scores=[[0.5, 0.25], [0.75, 0.125]], picks=[[12, 0], [3, 4]])
    assert outputs == [{"ids": [12, 0], "scores": [0.5, 0.25]}, {"ids": [3, 4], "scores": [0.75, 0.125]}]


def test_embed_has_the_vector() -> None:
    outputs = outputs_of({"kind": "embed", "pool": "mean"}, [5, 2], embedding=[[0.5, -1.0], [0.0, 2.0]])
    assert outputs == [{"embedding": [0.5, -1.0]}, {"embedding": [0.0, 2.0]}]


def test_sequence_has_the_vector_of_every_step() -> None:
    outputs = outputs_of({"kind": "sequence"}, [1, 2], sequence=[[0.5, -1.0], [1.5, 2.0], [3.0, 4.0]])
    assert outputs == [{"sequence": [[0.5, -1.0]]}, {"sequence": [[1.5, 2.0], [3.0, 4.0]]}]


ANSWERS: list[tuple[dict[str, Any], dict[str, Rows], list[set[str]]]] = [
    (CLASSIFY, {"scores": [[0.5, 0.25, 0.25]] * 2}, [{"label", "score", "scores"}] * 2),
    ({"kind": "regress", "pool": "last"}, {"scores": [[1.0], [2.0]]}, [{"value"}] * 2),
    (TAG, {"scores": [[0.5]] * 3, "picks": [[0]] * 3}, [{"labels", "scores"}] * 2),
    ({"kind": "span"}, {"scores": [[0.5]] * 2, "picks": [[0, 0]] * 2}, [{"start", "end", "score"}] * 2),
    ({"kind": "next", "top": 1}, {"scores": [[0.5]] * 2, "picks": [[7]] * 2}, [{"ids", "scores"}] * 2),
    ({"kind": "embed", "pool": "max"}, {}, [set()] * 2),
    ({"kind": "sequence"}, {}, [set()] * 2),
]


@pytest.mark.parametrize("returned", [(), ("embedding",), ("sequence",), ("embedding", "sequence")], ids=str)
@pytest.mark.parametrize("head, arrays, fields", ANSWERS, ids=lambda value: value.get("kind") if "kind" in value else "")
def test_output_has_the_fields_of_its_head_and_returned_vectors(
    head: dict[str, Any], arrays: dict[str, Rows], fields: list[set[str]], returned: tuple[str, ...]
) -> None:
    vectors: dict[str, Rows] = {"embedding": [[1.0, 2.0], [3.0, 4.0]], "sequence": [[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]}
    first, second = outputs_of(head, [1, 2], **arrays, **{name: vectors[name] for name in returned})
    assert [set(first), set(second)] == [head_fields | set(returned) for head_fields in fields]
    if "embedding" in returned:
        assert [first["embedding"], second["embedding"]] == vectors["embedding"]
    if "sequence" in returned:
        assert [first["sequence"], second["sequence"]] == [[[5.0, 6.0]], [[7.0, 8.0], [9.0, 10.0]]]


def test_score_is_the_shortest_decimal_of_its_float32() -> None:
    third = float(np.float32(1 / 3))
    [outputs] = outputs_of({"kind": "regress", "pool": "last", "outputs": 4}, [1], scores=[[third, 0.1, 1e-30, 3e38]])
    assert outputs["value"] == [0.33333334, 0.1, 1e-30, 3e38]
    assert float(np.float32(outputs["value"][0])) == third


@pytest.mark.parametrize("labels", [LABELS, ["50 %", 'a "quote"', "日本"]], ids=["plain", "escaped"])
def test_answers_written_together_equal_those_written_alone(labels: list[str]) -> None:
    writer = OutputWriter(spec(kind="classify", pool="max", labels=labels))
    rows = np.random.default_rng(0).dirichlet((0.1, 0.2, 3.0), 50).astype(FEATURES)
    answers = [(Answer((1, 3), steps=[4]), row.tobytes()) for row in rows]
    together = writer.write_all(answers)
    assert together == [writer.write(answer, data) for answer, data in answers]
    assert [list(json.loads(text)[0]["scores"]) for text in together] == [labels] * 50
    for output, row in zip(together, rows, strict=True):
        assert np.array_equal(np.array(list(json.loads(output)[0]["scores"].values()), FEATURES), row)


@pytest.mark.parametrize("outputs", [1, 3])
def test_values_written_together_equal_those_written_alone(outputs: int) -> None:
    writer = OutputWriter(spec(kind="regress", pool="last", outputs=outputs))
    rows = np.random.default_rng(0).normal(size=(50, outputs)).astype(FEATURES)
    answers = [(Answer((1, outputs), steps=[1]), row.tobytes()) for row in rows]
    together = writer.write_all(answers)
    assert together == [writer.write(answer, data) for answer, data in answers]
    for output, row in zip(together, rows, strict=True):
        assert np.array_equal(np.array(json.loads(output)[0]["value"], FEATURES).reshape(-1), row)
    assert writer.write_all([answers[0], (answers[1][0], (rows[1] * np.inf).tobytes())]) is None


def test_answers_that_differ_in_form_are_not_written_together() -> None:
    writer, row = OutputWriter(spec(**CLASSIFY)), np.array([0.5, 0.25, 0.25], FEATURES)
    plain = (Answer((1, 3), steps=[4]), row.tobytes())
    two = (Answer((2, 3), steps=[4, 1]), row.tobytes() * 2)
    vector = (Answer((1, 3), embedding=(1, 2), steps=[4]), row.tobytes() + bytes(8))
    broken = (Answer((1, 3), steps=[4]), (row * np.inf).tobytes())
    assert writer.write_all([plain, plain])
    for answer in (two, vector, broken):
        assert writer.write_all([plain, answer]) is None
    assert OutputWriter(spec(**TAG)).write_all([(Answer((1, 1), steps=[1]), bytes(4))]) is None


def test_missing_array_takes_no_bytes_of_the_next_array() -> None:
    [outputs] = outputs_of(TAG, [2], scores=[[0.5], [0.25]], picks=[[1], [2]], sequence=[[9.0, 8.0, 7.0], [6.0, 5.0, 4.0]])
    assert outputs == {
        "labels": ["far", "unknown"],
        "scores": [0.5, 0.25],
        "sequence": [[9.0, 8.0, 7.0], [6.0, 5.0, 4.0]],
    }


def test_chunk_that_the_engine_refuses_as_not_finite_is_named() -> None:
    writer = OutputWriter(spec(kind="regress", pool="last"))
    refused = Answer(finite=False)
    assert writer.write_all([(refused, b"")]) is None
    with pytest.raises(InvalidInput, match=r"^chunk drives .* to values that are not finite: send smaller numbers$") as raised:
        writer.write(refused, b"", lambda _: "chunk")
    assert raised.value.field == "chunk"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_input_with_a_result_that_is_not_finite_is_named(value: float) -> None:
    regress = {"kind": "regress", "pool": "last"}
    with pytest.raises(InvalidInput, match="not finite") as raised:
        outputs_of(regress, [2, 3], scores=[[1.0], [value]])
    assert raised.value.field == "inputs[1]"
    with pytest.raises(InvalidInput, match="not finite"):
        outputs_of({"kind": "sequence"}, [1, 1], sequence=[[value, 0.0], [0.0, 0.0]])
