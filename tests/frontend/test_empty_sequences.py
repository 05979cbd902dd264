"""Sequences without steps among others, and alone, over every API: the head over zeros, in their row of the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from websockets.sync.client import connect

from service.modeling import spec, store
from tests.models import LABELS
from tests.serving import Server, nearly_equal

IDS_OF = [[1, 2, 3], [], [4], []]
"""Sequences of token ids, two of them without steps."""


@pytest.fixture(scope="module")
def expected(every_head: Path) -> dict[str, Any]:
    """The outputs of models for a sequence without steps, computed from the weights of their heads."""

    def weights(name: str) -> dict[str, torch.Tensor]:
        version = every_head / name / "1"
        return store.read_arrays(version, spec.read(version))

    classes, numbers = weights("classes"), weights("numbers")
    vector = torch.nn.functional.softplus(classes["head.dense.0.bias"])
    scores = (vector @ classes["head.weight"] + classes["head.bias"]).softmax(0)
    best = int(scores.argmax())
    tokens, ids = weights("tokens")["head.bias"].softmax(0).topk(3)
    named = {"scores": dict(zip(LABELS, scores.tolist(), strict=True)), "score": float(scores[best])}
    return {
        "classes": {"label": LABELS[best], **named, "embedding": vector.tolist(), "sequence": []},
        "numbers": {"value": numbers["head.bias"].sigmoid().tolist()},
        "tags": {"labels": [], "scores": []},
        "tokens": {"ids": ids.tolist(), "scores": tokens.tolist()},
        "vectors": {"embedding": [0.0] * 10},
        "steps": {"sequence": []},
    }


def outputs(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["outputs"]
    return found


@pytest.mark.parametrize("name", ["classes", "numbers", "tags", "tokens", "vectors", "steps"])
def test_empty_rows_are_answered_among_others(heads_server: Server, expected: dict[str, Any], name: str) -> None:
    options: dict[str, Any] = {"return": ["embedding", "sequence"]} if name == "classes" else {}
    counted = heads_server.metric("seqserve_sequences_total", model=name)
    first, empty, second, other = outputs(heads_server.infer(name, IDS_OF, **options))
    assert nearly_equal(empty, expected[name]) and other == empty
    assert nearly_equal([first, second], outputs(heads_server.infer(name, [IDS_OF[0], IDS_OF[2]], **options)))
    assert heads_server.metric("seqserve_sequences_total", model=name) == counted + 6
    assert nearly_equal(outputs(heads_server.infer(name, [[]] * 3, **options)), [expected[name]] * 3)


def test_text_without_words_is_an_empty_sequence(heads_server: Server) -> None:
    answers = outputs(heads_server.infer("words", ["how far", "", "sea", "  "]))
    assert answers[1] == answers[3] == outputs(heads_server.infer("words", [[]]))[0] != answers[0]


def infer(server: Server, model: str, lengths: list[int], **ids: Any) -> dict[str, Any]:
    """Send token ids over the Open Inference Protocol, padded, or packed with offsets. Return the tensors of the answer by name."""
    name = "lengths" if len(ids["shape"]) == 2 else "offsets"
    tensors = [
        {"name": "ids", "datatype": "INT32", **ids},
        {"name": name, "datatype": "INT32", "shape": [len(lengths)], "data": lengths},
    ]
    reply = server.client.post(f"/v2/models/{model}/infer", json={"inputs": tensors})
    assert reply.status_code == 200, reply.text
    return {tensor["name"]: tensor for tensor in reply.json()["outputs"]}


def test_protocol_answers_empty_sequences(heads_server: Server) -> None:
    """This convolution of the model tags adds two steps to a row with steps."""
    padded = {"shape": [4, 3], "data": [1, 2, 3, *[0] * 3, 4, *[0] * 5]}
    packed = {"shape": [4], "data": [1, 2, 3, 4]}
    direct = [value for output in outputs(heads_server.infer("numbers", IDS_OF)) for value in output["value"]]
    for sizes, ids in (([3, 0, 1, 0], padded), ([0, 3, 3, 4, 4], packed)):
        assert nearly_equal(infer(heads_server, "numbers", sizes, **ids)["value"]["data"], direct)
    tags = infer(heads_server, "tags", [0, 3, 3, 4, 4], **packed)
    assert (tags["offsets"]["data"], tags["labels"]["shape"]) == ([0, 5, 5, 8, 8], [1, 8])
    tags = infer(heads_server, "tags", [3, 0, 1, 0], **padded)
    assert tags["lengths"]["data"] == [5, 0, 3, 0] and set(tags["labels"]["data"][5:10]) == {""}
    alone = {name: infer(heads_server, name, [0, 0], shape=[2, 1], data=[0, 0]) for name in ("numbers", "tags")}
    assert (alone["numbers"]["value"]["shape"], alone["tags"]["labels"]["shape"]) == ([2, 2], [2, 0])


@pytest.mark.parametrize(("name", "needed"), [("spans", 1), ("windows", 2)])
def test_model_that_needs_steps_names_the_row(heads_server: Server, name: str, needed: int) -> None:
    reply = heads_server.infer(name, [[1, 2], [], [3, 4]])
    assert (reply.status_code, reply.json()["field"]) == (400, "inputs[1]")
    assert reply.json()["error"] == f"inputs[1] has 0 steps and {name} needs at least {needed}: send a longer sequence"


def test_empty_chunk_of_a_session_is_refused(heads_server: Server) -> None:
    reply = heads_server.infer("numbers", [[]], session="s")
    assert (reply.status_code, reply.json()["field"]) == (400, "inputs[0]") and "at least one step" in reply.json()["error"]
    with connect(heads_server.address.replace("http", "ws") + "/stream?model=numbers", proxy=None) as stream:
        for message in ('{"input": []}', b""):
            stream.send(message)
            assert json.loads(stream.recv(timeout=60))["field"] == "input"
    assert heads_server.client.delete("/sessions/s/state").status_code == 404, "no session was opened"
