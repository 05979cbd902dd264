"""The header x-session-id names the session of a request, over every protocol and on both paths."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.frontend.in_process import InProcess

HEADER = "x-session-id"
SERVICE = "/inference.GRPCInferenceService"
GENERAL = {"TE": "trailers"}
"""A header that sends a request to the general path."""
LARGE = 40_000
"""Steps of an input that the decoder parses."""


@pytest.fixture(params=["hot", "general", "decoder"])
def path(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


def infer(heads: InProcess, header: str | None, path: str = "hot", **body: Any) -> httpx.Response:
    """Send a chunk of one step, or a large chunk. header: the value of x-session-id."""
    chunk = [1] * (LARGE if path == "decoder" else 1)
    headers = ({} if header is None else {HEADER: header}) | (GENERAL if path == "general" else {})
    return heads.client.post("/infer", json={"model": "accumulator", "inputs": [chunk], **body}, headers=headers)


def chunks(answer: httpx.Response, path: str = "hot") -> int:
    """Return how many chunks of this size a session has."""
    assert answer.status_code == 200, answer.text
    steps: int = answer.json()["session"]["steps"]
    return steps // (LARGE if path == "decoder" else 1)


def close(heads: InProcess, *sessions: str) -> None:
    for session in sessions:
        assert heads.client.delete(f"/sessions/{session}/state").status_code == 200


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    body = answer.json()
    return answer.status_code, body["code"], body.get("field")


def test_header_names_the_session(heads: InProcess, path: str) -> None:
    assert chunks(infer(heads, "a", path), path) == 1
    assert chunks(infer(heads, "a", path), path) == 2
    assert chunks(infer(heads, "b", path), path) == 1
    assert chunks(infer(heads, "a", path, session="a", start=False), path) == 3
    assert chunks(infer(heads, None, path, session="a", end=True), path) == 4
    assert chunks(infer(heads, "b", path, end=True), path) == 2


def test_other_session_in_the_header_is_refused(heads: InProcess, path: str) -> None:
    answer = infer(heads, "there", path, session="here")
    assert refusal(answer) == (400, "invalid_input", "session")
    assert answer.json()["error"].startswith("session is here and the header x-session-id is there: ")
    assert heads.client.delete("/sessions/here/state").status_code == 404, "no session was opened"


def test_malformed_header_is_refused(heads: InProcess, path: str) -> None:
    for value in ("stream:1", "x" * 129):
        assert refusal(infer(heads, value, path)) == (400, "invalid_input", HEADER)
    twice = [(HEADER, "a"), (HEADER, "a"), *(GENERAL.items() if path == "general" else ())]
    answer = heads.client.post("/infer", json={"model": "accumulator", "inputs": [[1]]}, headers=twice)
    assert refusal(answer) == (400, "invalid_input", HEADER)
    assert "session" not in infer(heads, "", path).json()


@pytest.mark.parametrize("path", ["hot", "general"])
def test_header_takes_one_input(heads: InProcess, path: str) -> None:
    answer = infer(heads, "a", path, inputs=[[1], [1]])
    assert refusal(answer)[:2] == (400, "invalid_input")
    assert "names a session" in answer.json()["error"]


def infer_oip(heads: InProcess, session: str | None, extra: dict[str, str], **parameters: Any) -> dict[str, Any]:
    """Send a request of one step with raw values, and return the head of its reply."""
    tensor = {"name": "ids", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
    head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    headers = extra | {"Inference-Header-Content-Length": str(len(head))} | ({} if session is None else {HEADER: session})
    answer = heads.client.post("/v2/models/accumulator/infer", content=head + b"\1\0\0\0", headers=headers)
    size = int(answer.headers.get("Inference-Header-Content-Length", len(answer.content)))
    body: dict[str, Any] = json.loads(answer.content[:size])
    return body


@pytest.mark.parametrize("extra", [{}, GENERAL], ids=["hot", "general"])
def test_header_names_the_sequence_over_rest(heads: InProcess, extra: dict[str, str]) -> None:
    """Requests without a session have a remembered form. A session with the same body must not take it."""

    def steps(session: str | None, **parameters: Any) -> int | None:
        found: int | None = infer_oip(heads, session, extra, **parameters).get("parameters", {}).get("sequence_steps")
        return found

    assert [steps(None), steps(None)] == [None, None]
    assert [steps("a", sequence_start=True), steps("b", sequence_start=True), steps("a"), steps(None), steps("b")] == [
        *(1, 1, 2, None, 2)
    ]
    assert [steps("a", sequence_id="a"), steps(None, sequence_id="a")] == [3, 4]
    assert steps("7", sequence_id=7, sequence_start=True) == 1
    refused = infer_oip(heads, "a", extra, sequence_id=7)
    assert (refused["code"], refused["field"]) == ("invalid_input", "parameters.sequence_id")
    assert "sequence_id is 7 and the header x-session-id is a: " in refused["error"]
    assert infer_oip(heads, "stream:1", extra)["field"] == HEADER
    close(heads, "a", "b", "7")


def message(**parameters: str | int | bool) -> Any:
    """Return a ModelInferRequest of one step."""
    request = service_pb2.ModelInferRequest(model_name="accumulator", raw_input_contents=[b"\1\0\0\0"])
    request.inputs.add(name="ids", datatype="INT32", shape=[1, 1])
    for name, value in parameters.items():
        kind = {str: "string_param", bool: "bool_param", int: "int64_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def call(channel: grpc.Channel, request: Any, *sessions: str, general: bool = False) -> int:
    """Return the steps of the session in the response to ModelInfer; 0 without a session."""
    method = channel.unary_unary(
        f"{SERVICE}/ModelInfer", service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelInferResponse.FromString
    )
    compression = grpc.Compression.Gzip if general else None
    answer = method(request, metadata=[(HEADER, session) for session in sessions], timeout=60, compression=compression)
    steps: int = answer.parameters["sequence_steps"].int64_param
    return steps


@pytest.mark.parametrize("general", [False, True], ids=["hot", "general"])
def test_metadata_names_the_sequence(heads: InProcess, general: bool) -> None:
    with grpc.insecure_channel(heads.grpc) as channel:

        def refused(request: Any, *sessions: str) -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.RpcError) as raised:
                call(channel, request, *sessions, general=general)
            return raised.value.code(), raised.value.details()

        start = message(sequence_start=True)
        assert [call(channel, message(), general=general) for _ in range(2)] == [0, 0]
        assert [call(channel, start, name, general=general) for name in ("a", "b")] == [1, 1]
        assert call(channel, message(), "a", general=general) == 2
        assert call(channel, message(), general=general) == 0
        assert call(channel, message(sequence_id="a"), "a", general=general) == 3
        code, details = refused(message(sequence_id=7), "a")
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "sequence_id is 7 and the header x-session-id is a: " in details
        for sessions in (("stream:1",), ("a", "b")):
            assert refused(message(), *sessions)[0] is grpc.StatusCode.INVALID_ARGUMENT
    close(heads, "a", "b")


def test_stream_with_metadata_carries_one_sequence(heads: InProcess) -> None:
    requests = [
        message(sequence_start=True),
        message(),
        message(sequence_id="b", sequence_start=True),
        message(sequence_id="a"),
    ]
    with grpc.insecure_channel(heads.grpc) as channel:
        method = channel.stream_stream(
            f"{SERVICE}/ModelStreamInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        answers = list(method(iter(requests), metadata=[(HEADER, "a")], timeout=60))
        with pytest.raises(grpc.RpcError) as raised:
            list(method(iter(requests), metadata=[(HEADER, "stream:1")], timeout=60))
    assert [answer.infer_response.parameters["sequence_steps"].int64_param for answer in answers] == [1, 2, 0, 3]
    assert "sequence_id is b and the header x-session-id is a: " in answers[2].error_message
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    close(heads, "a")


def stream(heads: InProcess, query: str, *headers: tuple[str, str]) -> ClientConnection:
    address = heads.address.replace("http", "ws")
    return connect(f"{address}/stream?model=accumulator{query}", additional_headers=list(headers), proxy=None)


def test_handshake_names_the_session(heads: InProcess) -> None:
    for steps, query in ((1, ""), (2, "&session=a")):
        with stream(heads, query, (HEADER, "a")) as socket:
            socket.send('{"input": [1]}')
            assert json.loads(socket.recv(timeout=60))["session"] == {"id": "a", "steps": steps}
    close(heads, "a")


@pytest.mark.parametrize(
    ("headers", "field"),
    [([(HEADER, "there")], "session"), ([(HEADER, "here"), (HEADER, "here")], HEADER), ([(HEADER, "stream:1")], HEADER)],
    ids=["other", "twice", "reserved"],
)
def test_handshake_of_another_session_is_refused(heads: InProcess, headers: list[tuple[str, str]], field: str) -> None:
    with pytest.raises(InvalidStatus) as raised:
        stream(heads, "&session=here", *headers)
    answer = raised.value.response
    assert (answer.status_code, json.loads(answer.body or b"")["field"]) == (400, field)


def test_session_routes_refuse_another_session_in_the_header(heads: InProcess) -> None:
    assert chunks(infer(heads, "a")) == 1
    for method, path in (("GET", "state"), ("PUT", "state"), ("DELETE", "state"), ("POST", "fork")):
        answer = heads.client.request(method, f"/sessions/a/{path}", headers={HEADER: "b"})
        assert refusal(answer) == (400, "invalid_input", "session")
    assert heads.client.delete("/sessions/a/state", headers={HEADER: "a"}).status_code == 200


def test_other_requests_ignore_the_header(heads: InProcess) -> None:
    for path in ("/models", "/v2/models/accumulator", "/readyz", "/metrics"):
        assert heads.client.get(path, headers={HEADER: "stream:1"}).status_code == 200
