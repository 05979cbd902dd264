"""POST /infer: what is accepted, and errors. On the real service: the list of models, statistics, and the times of its stages."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.frontend.conftest import BODY_BYTES
from tests.frontend.in_process import InProcess
from tests.kernels.families import cpu_backends
from tests.models import LABELS, WORDS
from tests.raw_websocket import connection
from tests.serving import Server, eventually

QUESTION = "how far is the sea ?"
GOOD = {"model": "words", "inputs": [QUESTION]}


def refused(answer: httpx.Response, status: int, code: str, *parts: str, field: str | None = None) -> None:
    """Check the status, code and field of an error, and that its message has these parts."""
    body = answer.json()
    assert (answer.status_code, body["code"], body.get("field")) == (status, code, field), body
    assert set(body) <= {"error", "code", "field"}
    for part in parts:
        assert part in body["error"], body["error"]


def test_openapi_describes_every_route(local: InProcess) -> None:
    document = local.client.get("/openapi.json").json()
    paths = document["paths"]
    body = paths["/infer"]["post"]["requestBody"]["content"]["application/json"]
    assert ", ".join(body["schema"]["properties"]) == FIELDS.removeprefix("known fields are ")
    assert {"text", "token ids", "rows of numbers"} < set(body["examples"])
    operations = [operation for path in paths.values() for operation in path.values()]
    assert {tag["name"] for tag in document["tags"]} == {tag for one in operations for tag in one["tags"]}
    assert len({(operation["summary"], *operation["tags"]) for operation in operations}) == len(operations)
    assert set(paths["/healthz"]["get"]["responses"]) == {"200", "default"}
    assert set(paths["/sessions/{id}/state"]) == {"get", "put", "delete"}
    assert [each["name"] for each in paths["/stream"]["get"]["parameters"] if each["required"]] == ["model"]
    assert {path for path in paths if not path.startswith("/v2")} == {
        *("/infer", "/stream", "/sessions/{id}/state", "/sessions/{id}/fork"),
        *("/models", "/models/{name}/card", "/tokens", "/access", "/healthz", "/readyz", "/metrics"),
    }


NOT_JSON = [
    *(b"", b"{", b"status", b'{"model": "words", "inputs": [', b"\0", b'{"model": "words" "inputs": []}', b"[" * 5000),
    *(b"\xff\xfe", b'{"model": "\xff", "inputs": ["a"]}', b'{"model": "\\ud800", "inputs": ["a"]}'),
]


def test_body_that_is_no_json_object_gets_400(local: InProcess) -> None:
    for body in NOT_JSON:
        refused(local.client.post("/infer", content=body), 400, "invalid_request", "not JSON")
    for value in ("NaN", "-Infinity", "1e400"):
        body = b'{"model": "sensors", "inputs": [[[1, %b, 3]]]}' % value.encode()
        refused(local.client.post("/infer", content=body), 400, "invalid_input", "finite", field="inputs[0][0][1]")
    for text in ("null", "3", "[]", '"words"'):
        refused(local.client.post("/infer", content=text), 400, "invalid_request", '"inputs"')


SENSORS = {"model": "sensors"}
ROWS, IDS = "list of 3 finite float32 numbers", "from 0 to 9"
FIELDS = "known fields are model, inputs, version, return, states, session, start, end, steps, deadline_ms, priority"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    *(({"inputs": ["a"]}, "model", "missing"), ({"model": "words"}, "inputs", "missing")),
    ({"model": 3, "inputs": ["a"]}, "model", "string"),
    *(({**GOOD, "inputs": inputs}, "inputs", part) for inputs, part in (("how far", "array"), ([], "at least 1"))),
    ({**GOOD, "inputs": ["who", 3]}, "inputs[1]", "a string or a list of token ids"),
    *(({**GOOD, "inputs": [value]}, "inputs[0]", part) for value, part in ((None, "null"), ({"text": "who"}, "an object"))),
    *(({**GOOD, "inputs": [[1, value]]}, "inputs[0][1]", "whole number") for value in (2.5, True)),
    *(({**GOOD, "inputs": [[1], [1, id]]}, "inputs[1][1]", IDS) for id in (-1, len(WORDS), 2**63, 10**400)),
    ({**SENSORS, "inputs": ["who"]}, "inputs[0]", ROWS),
    *(({**SENSORS, "inputs": [rows]}, "inputs[0][0]", ROWS) for rows in ([1, 2, 3], [[1, 2]])),
    *(({**SENSORS, "inputs": [[[1, 2, value]]]}, "inputs[0][0][2]", "finite") for value in ("3", None, 1e39)),
    ({**GOOD, "colour": "red"}, "colour", FIELDS),
    ({**GOOD, "session": 7}, "session", "string"),
    *(({**GOOD, "session": "s", name: value}, name, "boolean") for name, value in (("start", "yes"), ("end", None))),
    ({**GOOD, "return": ["everything"]}, "return[0]", "embedding"),
    *(({**GOOD, "return": value}, "return", part) for value, part in (("embedding", "array"), (["embedding"] * 9, ""))),
    ({**GOOD, "steps": 2}, "steps", "requires session"),
    ({**GOOD, "session": "a", "steps": -1}, "steps", "greater than or equal to 0"),
    ({**GOOD, "session": "a", "steps": 2**64}, "steps", "less than or equal to 9223372036854775807"),
    *(({**GOOD, "deadline_ms": value}, "deadline_ms", part) for value, part in ((0, "greater than 0"), ("5", "number"))),
    ({**GOOD, "deadline_ms": 10**9}, "deadline_ms", "SEQSERVE_MAX_DEADLINE_MS is 60000"),
    *(({**GOOD, "priority": value}, "priority", part) for value, part in ((11, "less than or equal to 10"), (0.5, "integer"))),
    ({**GOOD, "version": [1]}, "version", "string"),
    ({**SENSORS, "inputs": [[]], "session": "a"}, "inputs[0]", "at least one step"),
]


@pytest.mark.parametrize(("body", "field", "part"), WRONG, ids=range(len(WRONG)))
def test_invalid_field_gets_400_and_is_named(local: InProcess, body: dict[str, Any], field: str, part: str) -> None:
    refused(local.client.post("/infer", content=json.dumps(body)), 400, "invalid_input", part, field=field)


def test_unknown_model_or_version_gets_404_with_the_known_ones(local: InProcess) -> None:
    for name in ("nobody", "", "../words", "words/1", "x" * 5000, "wörds", "a\nb"):
        refused(local.infer(name, ["a"]), 404, "unknown_model", "sensors, words", field="model")
    for version in ("3", 0, "latest", "01", -1):
        refused(local.infer("words", ["a"], version=version), 404, "unknown_model", "served are 1, 2", field="version")


def test_requests_beyond_a_limit_get_413_with_the_limit(local: InProcess) -> None:
    limits: list[tuple[list[Any], str, tuple[str, ...]]] = [
        ([[1] * 1_000_000], "inputs[0]", ("1000000 steps", "at most 64")),
        (["who " * 65], "inputs[0]", ("65 steps", "max_steps")),
        (["x" * 1_000_000], "inputs[0]", ("1000000 characters", "at most 2048")),
        (["who"] * 65, "inputs", ("65 inputs", "SEQSERVE_MAX_INPUTS is 64")),
    ]
    for inputs, field, parts in limits:
        refused(local.infer("words", inputs), 413, "too_large", *parts, field=field)
    assert len(local.infer("words", ["who " * 64] * 64).json()["outputs"]) == 64


def test_body_at_the_size_limit_is_accepted(local: InProcess) -> None:
    limit, body = BODY_BYTES, json.dumps(GOOD).encode()
    assert local.client.post("/infer", content=body.ljust(limit)).status_code == 200
    for content in (body.ljust(limit + 1), (b" " * (1 << 20) for _ in range(64))):
        refused(local.client.post("/infer", content=content), 413, "too_large", "SEQSERVE_MAX_BODY_BYTES", str(limit))
    for digits in (16, 19):
        with connection(local) as client:
            client.sendall(b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %b\r\n\r\n" % (b"9" * digits))
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 "), "the body is not waited for"


def test_other_requests_to_the_route_are_refused(local: InProcess) -> None:
    medias = (("application/json; charset=utf-8", 200), ("application/vnd.api+json", 200), ("text/plain", 415))
    for media, status in medias:
        headers = {"content-type": media}
        assert local.client.post("/infer", content=json.dumps(GOOD), headers=headers).status_code == status
    answer = local.client.post("/infer", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    refused(answer, 415, "unsupported_media", "Content-Encoding")
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        answer = local.client.request(method, "/infer")
        refused(answer, 405, "method_not_allowed", "POST")
        assert answer.headers["allow"] == "POST"
    for path in ("/ui", "/infer/x", "/v3", "/models/words", "/../etc/passwd", "/%00"):
        refused(local.client.get(path), 404, "unknown_route", "/docs")


@pytest.mark.parametrize("general", [b"", b"TE: trailers\r\n"], ids=["hot", "general"])
def test_disconnected_client_is_cancelled_in_the_engine(local: InProcess, general: bytes) -> None:
    gone, body = local.metric("seqserve_requests_total", outcome="client_gone"), json.dumps(GOOD).encode()
    head = b"POST /infer HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n" % (general, len(body))
    with local.held() as engine:
        cancelled = engine.cancelled
        with connection(local) as client:
            client.sendall(head + body)
            eventually(lambda: engine.waiting)
        eventually(lambda: engine.cancelled == cancelled + 1)
    eventually(lambda: local.metric("seqserve_requests_total", outcome="client_gone") == gone + 1)


# The real service.

COUNTS = {"request_success": 1, "count": 2, "exec_count": 1}
TIMES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
STAGES = {
    **dict.fromkeys(("parse", "channel", "reply", "encode", "total"), 1),
    **dict.fromkeys(("queue", "stage_in", "device_wait", "compute", "stage_out"), 2),
}
"""How often each stage of a request with two inputs is counted."""


def test_models_are_listed_with_device_and_backends(server: Server) -> None:
    listed = server.client.get("/models").json()["models"]
    assert [(model["name"], model["version"], model["ready"], model["streams"]) for model in listed] == [
        *(("sensors", "1", True, True), ("words", "1", True, False), ("words", "2", True, False))
    ]
    assert (listed[0]["device"], listed[0]["backends"]) == ("cpu", [f"layers.0: {cpu_backends('lstm')[0]}"])
    assert listed[1]["head"]["labels"] == list(LABELS)
    assert "layers.0: folded table" in listed[1]["backends"]


def test_requests_and_their_stages_are_counted(server: Server) -> None:
    def counts() -> dict[str, float]:
        stages = {stage: server.metric("seqserve_stage_seconds_count", model="words", stage=stage) for stage in STAGES}
        named = {name: server.metric(f"nv_inference_{name}", model="words", version="2") for name in COUNTS}
        failed = server.metric("nv_inference_request_failure", model="words", reason="OTHER")
        return stages | named | {"ok": server.metric("seqserve_requests_total", model="words", outcome="ok"), "failed": failed}

    before = counts()
    assert [server.infer("words", inputs).status_code for inputs in ([QUESTION, "who"], [1])] == [200, 400]
    grown = {name: count - before[name] for name, count in counts().items()}
    assert grown == {**STAGES, "total": 2, **COUNTS, "ok": 1, "failed": 1}
    assert all(server.metric(f"nv_inference_{name}_duration_us", model="words") > 0 for name in TIMES)
    assert server.metric("nv_inference_pending_request_count", model="words") == 0 < server.metric("seqserve_ready")
    assert server.metric("seqserve_kernel_backend_info", model="words", version="1", backend=cpu_backends("lstm")[0]) == 1
    for path, names in (("", ["sensors", "words", "words"]), ("/words", ["words"] * 2), ("/words/versions/2", ["words"])):
        found = server.client.get(f"/v2/models{path}/stats").json()["model_stats"]
        assert [model["name"] for model in found] == names
    [words] = found
    assert 0 < words["inference_stats"]["compute_infer"]["ns"] < words["inference_stats"]["success"]["ns"]
    assert words["last_inference"] > 1_600_000_000_000
    for path in ("/v2/models/nobody/stats", "/v2/models/words/versions/3/stats"):
        assert server.client.get(path).status_code == 404


# Server-Timing names the stages of a request, for a client that asks for it.

ORDER = ["parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode", "total"]
TEXT: dict[str, Any] = {"model": "words", "inputs": [QUESTION]}
LONG = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 3000]}
"""Runs in several batches."""
CHUNK = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 3], "session": "timed", "end": True}


def timing(server: Server, body: dict[str, Any], prefer: str = "server-timing") -> dict[str, float]:
    answer = server.client.post("/infer", json=body, headers={"prefer": prefer})
    assert answer.headers["preference-applied"] == "server-timing"
    return {name: float(duration) for name, duration in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}


@pytest.mark.parametrize("body", [{**TEXT, "inputs": [QUESTION, "who"]}, LONG, CHUNK], ids=["texts", "long", "chunk"])
def test_stages_of_a_request_add_up(body: dict[str, Any], server: Server) -> None:
    before = server.metric("seqserve_device_busy_seconds_total", engine="0")
    stages = timing(server, body)
    assert list(stages) == ORDER
    total = stages.pop("total")
    assert 0 < stages["compute"] < total and 0 < sum(stages.values()) <= total + 0.01
    busy = server.metric("seqserve_device_busy_seconds_total", engine="0") - before
    assert busy >= stages["compute"] / 1000 - 0.001, "times are rounded"


def test_only_answers_to_clients_that_ask_have_times(server: Server) -> None:
    assert list(timing(server, {**TEXT, "inputs": [""]})) == ["parse", "reply", "encode", "total"]
    for prefer in ("respond-async, Server-Timing", "server-timing; x=1"):
        assert timing(server, TEXT, prefer)["total"] > 0
    others: tuple[dict[str, str], ...] = (
        {},
        {"prefer": "respond-async"},
        {"prefer": "server-timing-other"},
        {"te": "trailers"},
    )
    answers = [server.client.post("/infer", json=TEXT, headers=headers) for headers in others]
    answers.append(server.client.post("/infer", json={**TEXT, "inputs": [1]}, headers={"prefer": "server-timing"}))
    assert not any(answer.headers.keys() & {"server-timing", "preference-applied"} for answer in answers)
