"""Sequences without steps among others, and alone, over every API: the head over zeros, in their row of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from websockets.sync.client import connect

from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.modeling import spec, store
from tests.models import LABELS
from tests.serving import Server

IDS_OF = [[1, 2, 3], [], [4], []]
"""Sequences of token ids, two of them without steps."""
NAMES = ["classes", "numbers", "tags", "tokens", "vectors", "steps"]
TEXT = ["how far", "", "sea", "  "]


def arrays(folder: Path, name: str) -> dict[str, torch.Tensor]:
    version = folder / name / "1"
    return store.read_arrays(version, spec.read(version))


def expected(folder: Path, name: str) -> dict[str, Any]:
    """Return the output for a sequence without steps, computed from the weights of the head."""
    weights = arrays(folder, name)
    if name == "classes":
        vector = torch.nn.functional.softplus(weights["head.dense.0.bias"])
        scores = (vector @ weights["head.weight"] + weights["head.bias"]).softmax(0)
        best = int(scores.argmax())
        return {
            "label": LABELS[best],
            "score": float(scores[best]),
            "scores": dict(zip(LABELS, scores.tolist(), strict=True)),
        }
    if name == "numbers":
        return {"value": weights["head.bias"].sigmoid().tolist()}
    if name == "tokens":
        scores, ids = weights["head.bias"].softmax(0).topk(3)
        return {"ids": ids.tolist(), "scores": scores.tolist()}
    if name == "vectors":
        return {"embedding": [0.0] * 10}
    return {"tags": {"labels": [], "scores": []}, "steps": {"sequence": []}}[name]


def near(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return an output that is compared within rounding."""
    return {
        name: value if isinstance(value, str) or not value or name == "sequence" else pytest.approx(value, abs=1e-6)
        for name, value in output.items()
        if name != "labels"
    } | ({"labels": output["labels"]} if "labels" in output else {})


def outputs(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["outputs"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_empty_rows_are_answered_among_others(heads_server: Server, every_head: Path, name: str) -> None:
    counted = heads_server.metric("seqserve_sequences_total", model=name)
    first, empty, second, other = outputs(heads_server.infer(name, IDS_OF))
    assert empty == near(expected(every_head, name)) and other == empty
    assert [first, second] == [near(output) for output in outputs(heads_server.infer(name, [IDS_OF[0], IDS_OF[2]]))]
    assert heads_server.metric("seqserve_sequences_total", model=name) == counted + 6
    for count in (1, 3):
        assert outputs(heads_server.infer(name, [[]] * count)) == [near(expected(every_head, name))] * count


def test_text_without_words_is_an_empty_sequence(heads_server: Server) -> None:
    answers = outputs(heads_server.infer("words", TEXT))
    assert answers[1] == answers[3] == outputs(heads_server.infer("words", [[]]))[0]
    assert answers[0] == near(outputs(heads_server.infer("words", ["how far"]))[0])


def test_features_may_be_empty(heads_server: Server, every_head: Path) -> None:
    empty, _ = outputs(heads_server.infer("sensors", [[], [[0.1, 0.2, 0.3]]]))
    scores = arrays(every_head, "sensors")["head.bias"].softmax(0).tolist()
    assert list(empty["scores"].values()) == pytest.approx(scores, abs=1e-6)


def test_empty_rows_have_the_vectors_that_a_request_asks_for(heads_server: Server, every_head: Path) -> None:
    for inputs, place in ([[]], 0), ([[1, 2], []], 1):
        answer = outputs(heads_server.infer("classes", inputs, **{"return": ["embedding", "sequence"]}))[place]
        assert answer["sequence"] == []
        expected_vector = torch.nn.functional.softplus(arrays(every_head, "classes")["head.dense.0.bias"])
        assert answer["embedding"] == pytest.approx(expected_vector.tolist(), abs=1e-6)


def test_state_after_no_step_is_the_state_before(heads_server: Server, every_head: Path) -> None:
    weights = arrays(every_head, "numbers")
    learned = {
        "layers.1.0.forward.hidden": weights["layers.1.0.forward.start"].tolist(),
        "layers.1.0.forward.cell": weights["layers.1.0.forward.start_cell"].tolist(),
    }
    given = {"layers.1.0.forward.cell": [0.5, -1.0, 2.0]}
    states = [{}, given, {}, given]
    for inputs, brought in ([[], [], [1, 2], []], states), ([[], []], states[:2]):
        answers = outputs(heads_server.infer("numbers", inputs, states=brought, **{"return": ["state"]}))
        assert answers[0]["state"] == {name: pytest.approx(numbers) for name, numbers in learned.items()}
        assert answers[1]["state"] == {name: pytest.approx(numbers) for name, numbers in (learned | given).items()}
    mixed = outputs(heads_server.infer("numbers", [[], [1, 2]], states=[given, given], **{"return": ["state"]}))
    alone = outputs(heads_server.infer("numbers", [[1, 2]], states=[given], **{"return": ["state"]}))
    assert mixed[1]["state"] == {name: pytest.approx(numbers, abs=1e-6) for name, numbers in alone[0]["state"].items()}


def test_large_request_may_have_empty_sequences(heads_server: Server, every_head: Path) -> None:
    inputs = [[1] * 60, *[[2] * 60] * 30, []]
    body = json.dumps({"model": "numbers", "inputs": inputs}) + " " * MAX_LOOP_BODY_BYTES
    answers = outputs(heads_server.client.post("/infer", content=body))
    assert answers[-1] == near(expected(every_head, "numbers")) and len(answers) == 32


# Open Inference Protocol.


@pytest.mark.parametrize("layout", [("lengths", [3, 0, 1, 0]), ("offsets", [0, 3, 3, 4, 4])], ids=["padded", "packed"])
def test_protocol_answers_empty_sequences(heads_server: Server, layout: tuple[str, list[int]]) -> None:
    name, sizes = layout
    ids = (
        {"shape": [4, 3], "data": [1, 2, 3, *[0] * 3, 4, *[0] * 5]}
        if name == "lengths"
        else {"shape": [4], "data": [1, 2, 3, 4]}
    )
    tensors = [
        {"name": "ids", "datatype": "INT32", **ids},
        {"name": name, "datatype": "INT32", "shape": [len(sizes)], "data": sizes},
    ]

    def infer(model: str) -> dict[str, Any]:
        reply = heads_server.client.post(f"/v2/models/{model}/infer", json={"inputs": tensors})
        assert reply.status_code == 200, reply.text
        return {tensor["name"]: tensor for tensor in reply.json()["outputs"]}

    direct = [value for output in outputs(heads_server.infer("numbers", IDS_OF)) for value in output["value"]]
    assert infer("numbers")["value"]["data"] == pytest.approx(direct, abs=1e-6)
    tags = infer("tags")
    if name == "offsets":
        assert tags["offsets"]["data"] == [0, 5, 5, 8, 8], "this convolution adds two steps to a row with steps"
        assert tags["labels"]["shape"] == [1, 8]
    else:
        assert tags["lengths"]["data"] == [5, 0, 3, 0]
        assert set(tags["labels"]["data"][5:10]) == {""}


def test_protocol_in_json_answers_empty_sequences_alone(heads_server: Server, every_head: Path) -> None:
    tensors = [
        {"name": "ids", "datatype": "INT32", "shape": [2, 1], "data": [0, 0]},
        {"name": "lengths", "datatype": "INT32", "shape": [2], "data": [0, 0]},
    ]
    for name, shape in (("numbers", [2, 2]), ("tags", [2, 0])):
        reply = heads_server.client.post(f"/v2/models/{name}/infer", json={"inputs": tensors})
        assert reply.status_code == 200, reply.text
        assert reply.json()["outputs"][0]["shape"] == shape
    text = {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["", "sea"]}
    labels = heads_server.client.post("/v2/models/words/infer", json={"inputs": [text]}).json()["outputs"][0]["data"]
    assert labels[0] == outputs(heads_server.infer("words", [""]))[0]["label"]


# Requests that are still refused.


@pytest.mark.parametrize(("name", "needed"), [("spans", 1), ("windows", 2)])
def test_model_that_needs_steps_names_the_row(heads_server: Server, name: str, needed: int) -> None:
    reply = heads_server.infer(name, [[1, 2], [], [3, 4]])
    assert (reply.status_code, reply.json()["field"]) == (400, "inputs[1]")
    assert reply.json()["error"] == f"inputs[1] has 0 steps and {name} needs at least {needed}: send a longer sequence"


def test_empty_chunk_of_a_session_is_refused(heads_server: Server) -> None:
    reply = heads_server.infer("numbers", [[]], session="s")
    assert (reply.status_code, reply.json()["field"]) == (400, "inputs[0]")
    assert "at least one step" in reply.json()["error"]
    large = json.dumps({"model": "numbers", "inputs": [[]], "session": "s"}) + " " * MAX_LOOP_BODY_BYTES
    assert heads_server.client.post("/infer", content=large).status_code == 400
    tensors = [
        {"name": "ids", "datatype": "INT32", "shape": [1, 1], "data": [0]},
        {"name": "lengths", "datatype": "INT32", "shape": [1], "data": [0]},
    ]
    body = {"inputs": tensors, "parameters": {"sequence_id": "s", "sequence_start": True}}
    reply = heads_server.client.post("/v2/models/numbers/infer", json=body)
    assert (reply.status_code, reply.json()["field"]) == (400, "ids[0]")
    with connect(heads_server.address.replace("http", "ws") + "/stream?model=numbers", proxy=None) as stream:
        for message in ('{"input": []}', b""):
            stream.send(message)
            assert json.loads(stream.recv(timeout=60))["field"] == "input"
        stream.send('{"input": [1]}')
        assert json.loads(stream.recv(timeout=60))["session"]["steps"] == 1
    assert heads_server.client.delete("/sessions/s/state").status_code == 404, "no session was opened"
