"""The HTTP API over a real socket: valid requests, invalid requests, and clients that disconnect."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.families import cpu_backends
from tests.models import LABELS, WORDS
from tests.planted import Gate, plant
from tests.serving import Server, eventually, serving

QUESTION = "how far is the sea ?"
GOOD = {"model": "words", "inputs": [QUESTION]}
ROWS = [[0.1, 0.2, 0.3]] * 10
BATCH = 5
"""Sequences in a batch of a gated server."""


@pytest.fixture(autouse=True, params=["hot", "general"])
def path(request: pytest.FixtureRequest, server: Server) -> Iterator[None]:
    """Run every test on both paths through a frontend: a header that no endpoint reads sends requests to the general path.

    After every test, check that a valid request is answered, no request got 500, and no process restarted.
    """
    if request.param == "general":
        server.client.headers["te"] = "trailers"
    yield
    server.client.headers.pop("te", None)
    assert server.infer("words", [QUESTION]).status_code == 200
    assert server.metric("seqserve_requests_total", outcome="inference_failed") == 0
    assert server.metric("seqserve_process_restarts_total") == 0, server.log_file.read_text()


def refused(answer: httpx.Response, status: int, code: str, *parts: str, field: str | None = None) -> None:
    """Check the status, code and field of an error, and that its message has these parts."""
    body = answer.json()
    assert (answer.status_code, body["code"], body.get("field")) == (status, code, field), body
    assert set(body) <= {"error", "code", "field"}
    for part in parts:
        assert part in body["error"], body["error"]


# Valid requests.


def test_text_gets_a_label_and_scores(server: Server) -> None:
    answer = server.infer("words", [QUESTION]).json()
    assert answer["model"] == "words"
    assert answer["version"] == "2", "the newest version by default"
    (output,) = answer["outputs"]
    assert set(output["scores"]) == set(LABELS)
    assert output["score"] == max(output["scores"].values()) == output["scores"][output["label"]]
    assert sum(output["scores"].values()) == pytest.approx(1, abs=1e-6)


def test_text_and_its_token_ids_get_the_same_output(server: Server) -> None:
    ids = [WORDS.index(word) for word in QUESTION.split()]
    text, tokens = server.infer("words", [QUESTION, ids]).json()["outputs"]
    assert text == tokens


def test_outputs_keep_the_order_of_inputs_and_match_single_requests(server: Server) -> None:
    questions = ["how far", "who was the first ?", "sea", "is the sea far ?", "nothing known here"]
    together = server.infer("words", questions).json()["outputs"]
    alone = [server.infer("words", [question]).json()["outputs"][0] for question in questions]
    for batched, single in zip(together, alone, strict=True):
        assert batched["label"] == single["label"]
        assert batched["scores"] == pytest.approx(single["scores"], rel=1e-5)


def test_two_versions_are_served_at_once(server: Server) -> None:
    first, second = (server.infer("words", [QUESTION], version=version).json() for version in ("1", 2))
    assert (first["version"], second["version"]) == ("1", "2")
    assert first["outputs"] != second["outputs"]


def test_return_adds_embedding_and_sequence(server: Server) -> None:
    plain, extended = (
        server.infer("words", ["who", QUESTION]),
        server.infer("words", ["who", QUESTION], **{"return": ["embedding", "sequence"]}),
    )
    for without, output, steps in zip(plain.json()["outputs"], extended.json()["outputs"], (1, 6), strict=True):
        assert set(without) == {"label", "score", "scores"}
        assert len(output["embedding"]) == 10
        assert [len(step) for step in output["sequence"]] == [10] * steps
        pooled = [max(column) for column in zip(*output["sequence"], strict=True)]
        assert pooled == output["embedding"], "the model pools by the maximum over time"


def test_float_features_are_accepted(server: Server) -> None:
    outputs = server.infer("sensors", [[[0.1, -2, 3e3]], [[0, 0, 0]] * 7]).json()["outputs"]
    assert [output["label"] in LABELS for output in outputs] == [True, True]


def test_content_type_is_optional(server: Server) -> None:
    assert server.client.post("/infer", content=json.dumps(GOOD)).status_code == 200


@pytest.mark.parametrize("media", ["application/json", "application/json; charset=utf-8", "application/vnd.api+json"])
def test_every_json_content_type_is_accepted(server: Server, media: str) -> None:
    assert server.client.post("/infer", content=json.dumps(GOOD), headers={"content-type": media}).status_code == 200


def test_models_are_listed_with_device_and_backends(server: Server) -> None:
    listed = server.client.get("/models").json()["models"]
    assert [(model["name"], model["version"], model["ready"]) for model in listed] == [
        ("sensors", "1", True),
        ("words", "1", True),
        ("words", "2", True),
    ]
    assert listed[0]["device"] == "cpu"
    assert listed[0]["backends"] == [f"layers.0: {cpu_backends('lstm')[0]}"]
    assert listed[1]["head"]["labels"] == list(LABELS)
    assert "layers.0: folded table" in listed[1]["backends"]
    assert [model["streams"] for model in listed] == [True, False, False]


def test_health_routes_report_live_and_ready(server: Server) -> None:
    assert server.client.get("/healthz").json() == {"live": True}
    assert server.client.get("/readyz").json() == {"ready": True}


def test_openapi_describes_every_route(server: Server) -> None:
    assert "swagger" in server.client.get("/docs").text
    schema = server.client.get("/openapi.json").json()
    body = schema["paths"]["/infer"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    options = {"version", "return", "states", "session", "start", "end", "steps", "deadline_ms", "priority"}
    assert set(body["properties"]) == {"model", "inputs"} | options
    states = schema["paths"]["/sessions/{id}/state"]
    assert set(states) == {"get", "put", "delete"}
    assert [parameter["name"] for parameter in states["put"]["parameters"]] == ["id", "x-session-id"]
    parameters = schema["paths"]["/stream"]["get"]["parameters"]
    assert [parameter["name"] for parameter in parameters if parameter["required"]] == ["model"]
    assert {path for path in schema["paths"] if not path.startswith("/v2")} == {
        *("/infer", "/stream", "/sessions/{id}/state", "/sessions/{id}/fork"),
        *("/models", "/models/{name}/card", "/tokens", "/access", "/healthz", "/readyz", "/metrics"),
    }


def test_each_stage_of_a_request_is_timed(server: Server) -> None:
    before = {stage: server.metric("seqserve_stage_seconds_count", model="words", stage=stage) for stage in STAGES}
    answered = server.metric("seqserve_requests_total", model="words", outcome="ok")
    assert server.infer("words", [QUESTION, "who"]).status_code == 200
    assert server.metric("seqserve_requests_total", model="words", outcome="ok") == answered + 1
    for stage, added in STAGES.items():
        assert server.metric("seqserve_stage_seconds_count", model="words", stage=stage) == before[stage] + added, stage
    assert server.metric("seqserve_ready") == 1
    assert server.metric("seqserve_requests_in_flight") == 0
    assert server.metric("seqserve_kernel_backend_info", model="words", version="1", backend=cpu_backends("lstm")[0]) == 1


STAGES = {
    **dict.fromkeys(("parse", "channel", "reply", "encode", "total"), 1),
    **dict.fromkeys(("queue", "stage_in", "device_wait", "compute", "stage_out"), 2),
}
"""How often each stage of a request with two inputs is counted."""


# Invalid requests.

NOT_JSON = ["", "{", "status", '{"model": "words", "inputs": [', "\x00", '{"model": "words" "inputs": []}', "[" * 100_000]


@pytest.mark.parametrize("body", NOT_JSON, ids=range(len(NOT_JSON)))
def test_body_that_is_not_json_gets_400(server: Server, body: str) -> None:
    refused(server.client.post("/infer", content=body), 400, "invalid_request", "not JSON")


@pytest.mark.parametrize("body", [b"\xff\xfe", b'{"model": "\xff", "inputs": ["a"]}', b'{"model": "\\ud800", "inputs": ["a"]}'])
def test_body_that_is_not_unicode_gets_400(server: Server, body: bytes) -> None:
    refused(server.client.post("/infer", content=body), 400, "invalid_request", "not JSON")


@pytest.mark.parametrize("body", ["null", "3", "[]", '"words"'])
def test_json_that_is_not_an_object_gets_400(server: Server, body: str) -> None:
    refused(server.client.post("/infer", content=body), 400, "invalid_request", '"inputs"')


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"inputs": ["a"]}, "model", "missing"),
    ({"model": "words"}, "inputs", "missing"),
    ({"model": 3, "inputs": ["a"]}, "model", "string"),
    ({"model": None, "inputs": ["a"]}, "model", "string"),
    ({**GOOD, "inputs": "how far"}, "inputs", "array"),
    ({**GOOD, "inputs": []}, "inputs", "at least 1"),
    ({**GOOD, "inputs": ["who", 3]}, "inputs[1]", "a string or a list of token ids"),
    ({**GOOD, "inputs": [None]}, "inputs[0]", "null"),
    ({**GOOD, "inputs": [{"text": "who"}]}, "inputs[0]", "an object"),
    ({**GOOD, "inputs": [[1, 2.5]]}, "inputs[0][1]", "whole number"),
    ({**GOOD, "inputs": [[True]]}, "inputs[0][0]", "whole number"),
    ({**GOOD, "inputs": [["who"]]}, "inputs[0][0]", "whole number"),
    ({**GOOD, "inputs": [[1], [1, -1]]}, "inputs[1][1]", "from 0 to 9"),
    ({**GOOD, "inputs": [[len(WORDS)]]}, "inputs[0][0]", "from 0 to 9"),
    ({**GOOD, "inputs": [[2**31]]}, "inputs[0][0]", "from 0 to 9"),
    ({**GOOD, "inputs": [[2**63]]}, "inputs[0][0]", "from 0 to 9"),
    ({**GOOD, "inputs": [[10**400]]}, "inputs[0][0]", "from 0 to 9"),
    ({**GOOD, "inputs": [[[0.1, 0.2, 0.3]]]}, "inputs[0][0]", "whole number"),
    ({"model": "sensors", "inputs": ["who"]}, "inputs[0]", "list of 3 finite float32 numbers"),
    ({"model": "sensors", "inputs": [[1, 2, 3]]}, "inputs[0][0]", "list of 3 finite float32 numbers"),
    ({"model": "sensors", "inputs": [[[1, 2]]]}, "inputs[0][0]", "list of 3 finite float32 numbers"),
    ({"model": "sensors", "inputs": [[[1, 2, "3"]]]}, "inputs[0][0][2]", "finite"),
    ({"model": "sensors", "inputs": [[[1, 2, 3], [1, None, 3]]]}, "inputs[0][1][1]", "finite"),
    ({"model": "sensors", "inputs": [[[1, 2, 1e39]]]}, "inputs[0][0][2]", "finite"),
    (
        {**GOOD, "colour": "red"},
        "colour",
        "known fields are model, inputs, version, return, states, session, start, end, steps, deadline_ms, priority",
    ),
    ({**GOOD, "session": "s"}, "session", "because layers.1 (lstm) needs a whole sequence"),
    ({**GOOD, "session": 7}, "session", "string"),
    ({**GOOD, "session": "s", "start": "yes"}, "start", "boolean"),
    ({**GOOD, "session": "s", "end": None}, "end", "boolean"),
    ({**GOOD, "end": True}, "end", "requires session"),
    ({**GOOD, "return": ["everything"]}, "return[0]", "embedding"),
    ({**GOOD, "return": "embedding"}, "return", "array"),
    ({**GOOD, "steps": 2}, "steps", "requires session"),
    ({**GOOD, "session": "a", "steps": -1}, "steps", "greater than or equal to 0"),
    ({**GOOD, "session": "a", "steps": 2**64}, "steps", "less than or equal to 9223372036854775807"),
    ({**GOOD, "deadline_ms": 0}, "deadline_ms", "greater than 0"),
    ({**GOOD, "deadline_ms": -1}, "deadline_ms", "greater than 0"),
    ({**GOOD, "deadline_ms": "5"}, "deadline_ms", "number"),
    ({**GOOD, "deadline_ms": 10**9}, "deadline_ms", "SEQSERVE_MAX_DEADLINE_MS is 60000"),
    ({**GOOD, "priority": 11}, "priority", "less than or equal to 10"),
    ({**GOOD, "priority": 0.5}, "priority", "integer"),
    ({**GOOD, "version": [1]}, "version", "string"),
]


@pytest.mark.parametrize(
    ("body", "field", "part"), WRONG, ids=[f"{field}-{index}" for index, (_, field, _) in enumerate(WRONG)]
)
def test_invalid_field_gets_400_and_is_named(server: Server, body: dict[str, Any], field: str, part: str) -> None:
    refused(server.client.post("/infer", content=json.dumps(body)), 400, "invalid_input", part, field=field)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_nan_and_infinity_get_400(server: Server, value: str) -> None:
    body = json.dumps({"model": "sensors", "inputs": [[[1, "VALUE", 3]]]}).replace('"VALUE"', value)
    refused(server.client.post("/infer", content=body), 400, "invalid_input", "finite", field="inputs[0][0][1]")


@pytest.mark.parametrize("name", ["nobody", "", "../words", "words/1", "x" * 100_000, "wörds", "a\nb"])
def test_unknown_model_gets_404_with_the_known_models(server: Server, name: str) -> None:
    refused(server.infer(name, ["a"]), 404, "unknown_model", "sensors, words", field="model")


@pytest.mark.parametrize("version", ["3", 0, "latest", "01", -1])
def test_unknown_version_gets_404_with_the_known_versions(server: Server, version: str | int) -> None:
    refused(server.infer("words", ["a"], version=version), 404, "unknown_model", "served are 1, 2", field="version")


def test_too_many_steps_get_413_with_the_limit(server: Server) -> None:
    refused(server.infer("words", [[1] * 1_000_000]), 413, "too_large", "1000000 steps", "at most 64", field="inputs[0]")
    refused(server.infer("words", ["who " * 65]), 413, "too_large", "65 steps", "max_steps", field="inputs[0]")
    assert server.infer("words", ["who " * 64]).status_code == 200


def test_long_text_gets_413_before_tokenisation(server: Server) -> None:
    refused(server.infer("words", ["x" * 1_000_000]), 413, "too_large", "1000000 characters", "at most 2048", field="inputs[0]")


def test_too_many_inputs_get_413_with_the_setting(server: Server) -> None:
    refused(
        server.infer("words", ["who"] * 10_000), 413, "too_large", "10000 inputs", "SEQSERVE_MAX_INPUTS is 64", field="inputs"
    )
    assert len(server.infer("words", ["who"] * 64).json()["outputs"]) == 64


@pytest.mark.parametrize("chunked", [False, True])
def test_large_body_gets_413_with_the_setting(server: Server, chunked: bool) -> None:
    piece = b" " * (1 << 20)
    content: Any = (piece for _ in range(64)) if chunked else piece * 64
    refused(server.client.post("/infer", content=content), 413, "too_large", "SEQSERVE_MAX_BODY_BYTES", str(16 << 20))


def test_body_at_the_size_limit_is_accepted(server: Server) -> None:
    body = json.dumps(GOOD).encode()
    assert server.client.post("/infer", content=body.ljust(16 << 20)).status_code == 200
    assert server.client.post("/infer", content=body.ljust((16 << 20) + 1)).status_code == 413


def test_body_with_huge_content_length_gets_413_unread(server: Server) -> None:
    answer = raw(server, b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "application/octet-stream"])
def test_other_content_type_gets_415(server: Server, media: str) -> None:
    answer = server.client.post("/infer", content=json.dumps(GOOD), headers={"content-type": media})
    refused(answer, 415, "unsupported_media", "application/json")


def test_compressed_body_gets_415(server: Server) -> None:
    answer = server.client.post("/infer", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    refused(answer, 415, "unsupported_media", "Content-Encoding")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_method_gets_405_with_the_allowed_method(server: Server, method: str) -> None:
    answer = server.client.request(method, "/infer")
    refused(answer, 405, "method_not_allowed", "POST")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/ui", "/infer/x", "/v3", "/models/words", "/../etc/passwd", "/%00"])
def test_unknown_path_gets_404(server: Server, path: str) -> None:
    refused(server.client.get(path), 404, "unknown_route", "/docs")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20) | st.sampled_from(WORDS),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["model", "inputs", "version", "return", "session", "start", "end", "deadline_ms", "priority", "x"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
    model=st.sampled_from(["words", "sensors", None]),
)
def test_random_json_gets_a_reply_or_an_error_body(server: Server, body: Any, model: str | None) -> None:
    if isinstance(body, dict) and model is not None:
        body["model"] = model
    answer = server.client.post("/infer", content=json.dumps(body))
    assert answer.status_code in (200, 400, 404, 413, 504), answer.text
    assert answer.status_code == 200 or {"error", "code"} <= set(answer.json())


# Deadlines, priorities, full queues, clients that disconnect.


@dataclass
class Gated:
    """A server with a gated device, its gate, and threads for requests that wait."""

    server: Server
    gate: Gate
    pool: ThreadPoolExecutor

    def start(self, model: str, inputs: list[Any], **fields: Any) -> Future[httpx.Response]:
        """Send a request, and return its future response."""
        return self.pool.submit(self.server.infer, model, inputs, deadline_ms=60_000, **fields)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the engine busy with one batch. It ends after the `with` block."""
        arrived = self.arrived
        self.gate.let(0)
        running = self.start("sensors", [ROWS])
        try:
            eventually(lambda: self.arrived == arrived + 1 and self.queue_depth == 0)
            yield
        finally:
            self.gate.open()
        assert running.result().status_code == 200

    @property
    def arrived(self) -> float:
        """How many requests to "sensors" have arrived at the engine."""
        return self.server.metric("seqserve_stage_seconds_count", model="sensors", stage="channel")

    @property
    def queue_depth(self) -> float:
        return self.server.metric("seqserve_queue_depth")


@pytest.fixture(scope="module")
def gated(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    """A server with a gated device. Its batches are whole: no sequence is cut, however slow the device seems."""
    folder = tmp_path_factory.mktemp("log")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(20) as pool:
        patch.setenv("GATE", str(folder / "gate"))
        plant("gated-device", patch)
        gate = Gate(folder / "gate")
        limits = {"max_batch_sequences": str(BATCH), "batch_budget_ms": "60000", "max_waiting": "16", "max_inputs": "16"}
        with serving(models_folder, folder, **limits) as running:
            yield Gated(running, gate, pool)


def test_missed_deadline_gets_504_at_once(gated: Gated) -> None:
    with gated.busy():
        start = time.monotonic()
        answer = gated.server.infer("words", [QUESTION], deadline_ms=100)
        waited = time.monotonic() - start
    refused(answer, 504, "deadline_exceeded", "deadline")
    assert waited >= 0.1


def test_expired_requests_are_not_computed(gated: Gated) -> None:
    computed = gated.server.metric("seqserve_sequences_total", model="words")
    with gated.busy():
        assert gated.server.infer("words", [QUESTION] * 10, deadline_ms=50).status_code == 504
    assert gated.server.infer("words", [QUESTION]).status_code == 200
    assert gated.server.metric("seqserve_sequences_total", model="words") == computed + 1


def test_batches_form_while_the_engine_is_busy(gated: Gated) -> None:
    batches = gated.server.metric("seqserve_batch_sequences_count", model="words")
    with gated.busy():
        replies = [gated.start("words", [QUESTION]) for _ in range(15)]
        eventually(lambda: gated.queue_depth == 15)
    assert [reply.result().status_code for reply in replies] == [200] * 15
    assert gated.server.metric("seqserve_batch_sequences_count", model="words") == batches + 3


def test_disconnected_client_is_cancelled_without_harm_to_its_batch(gated: Gated) -> None:
    server = gated.server
    before = server.metric("seqserve_requests_total", outcome="client_gone")
    computed = server.metric("seqserve_sequences_total", model="words")
    with gated.busy():
        body = json.dumps(GOOD).encode()
        connection = connect(server)
        connection.sendall(b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        mates = [gated.start("words", [QUESTION]) for _ in range(5)]
        eventually(lambda: gated.queue_depth == 6)
        connection.close()
        eventually(lambda: server.metric("seqserve_requests_total", outcome="client_gone") == before + 1)
    assert [mate.result().status_code for mate in mates] == [200] * 5
    assert server.metric("seqserve_sequences_total", model="words") == computed + 5


def test_full_queue_gets_503_with_retry_after(gated: Gated) -> None:
    before = gated.server.metric("seqserve_refused_total", reason="overloaded")
    with gated.busy():
        requests = [gated.start("words", [QUESTION] * 8) for _ in range(5)]
        eventually(lambda: gated.server.metric("seqserve_refused_total", reason="overloaded") == before + 3)
    replies = [request.result() for request in requests]
    assert sorted(reply.status_code for reply in replies) == [200, 200, 503, 503, 503]
    rejected = next(reply for reply in replies if reply.status_code == 503)
    refused(rejected, 503, "overloaded", "16 sequences wait", "SEQSERVE_MAX_WAITING is 16")
    assert rejected.headers["retry-after"] == "1"


def test_higher_priority_runs_first(gated: Gated) -> None:
    with gated.busy():
        waiting = {priority: gated.start("sensors", [ROWS] * BATCH, priority=priority) for priority in (0, 5, -5)}
        eventually(lambda: gated.queue_depth == 3 * BATCH)
        gated.gate.let(1)
        for queued, priority in ((2, 5), (1, 0), (0, -5)):
            eventually(lambda depth=queued * BATCH: gated.queue_depth == depth)  # type: ignore[misc]
            gated.gate.let(1)
            assert waiting[priority].result().status_code == 200


# Connections.


def connect(server: Server) -> socket.socket:
    host, port = server.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def raw(server: Server, data: bytes, quiet_seconds: float = 1.0) -> bytes:
    """Send bytes, and return what the server sends until it closes the connection or sends nothing for some time."""
    with connect(server) as connection:
        connection.sendall(data)
        connection.settimeout(quiet_seconds)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except TimeoutError:
            pass
        return answer


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
    ids=["empty", "garbage", "negative", "smuggled", "bad chunk", "TLS"],
)
def test_malformed_http_gets_400_or_a_closed_connection(server: Server, data: bytes) -> None:
    answer = raw(server, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


def test_disconnect_inside_the_body_ends_the_request(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    eventually(lambda: server.metric("seqserve_requests_in_flight") == 0, 5)


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    body = json.dumps(GOOD).encode()
    head = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body)
    health = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    requests = head + b"\r\n" + body + health + head + b"Connection: close\r\n\r\n" + body
    answer = raw(server, requests, quiet_seconds=60)
    assert [answer.count(part) for part in (b"HTTP/1.1 200", b'"outputs"', b'"live"')] == [3, 2, 1]
    assert answer.index(b'"outputs"') < answer.index(b'"live"')
