"""The header x-session-id names the session of a request, over every protocol and on every path."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.errors import InvalidInput
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.session_header import SESSION_HEADER, header_session, resolve_session
from tests.frontend.in_process import InProcess

SERVICE = "/inference.GRPCInferenceService"
GENERAL = {"TE": "trailers"}
"""A header that sends a request to the general path."""
REST_PATHS = pytest.mark.parametrize("path", ["hot", "general", "decoder"])
PATHS = pytest.mark.parametrize("path", ["hot", "general"])


def test_header_is_empty_or_one_session_id() -> None:
    assert [header_session(values) for values in ([], [""], ["pump 7"])] == [None, None, "pump 7"]
    for values in (["stream:1"], ["x" * 129], ["a", "a"]):
        with pytest.raises(InvalidInput) as refused:
            header_session(values)
        assert refused.value.field == SESSION_HEADER


def test_header_and_request_name_the_same_session() -> None:
    pairs = (("a", None), (None, "a"), ("a", "a"))
    assert [resolve_session(named, header, "session") for named, header in pairs] == ["a"] * 3
    with pytest.raises(InvalidInput, match=r"^session is here and the header x-session-id is there: send the same") as refused:
        resolve_session("here", "there", "session")
    assert refused.value.field == "session"


def infer(heads: InProcess, header: str | None, path: str, **body: Any) -> httpx.Response:
    """Send a chunk of one step. header: the value of x-session-id. path: the decoder parses large bodies."""
    content = json.dumps({"model": "accumulator", "inputs": [[1]], **body})
    headers = ({} if header is None else {SESSION_HEADER: header}) | (GENERAL if path == "general" else {})
    return heads.client.post("/infer", content=content + " " * MAX_LOOP_BODY_BYTES * (path == "decoder"), headers=headers)


def close(heads: InProcess, *sessions: str) -> None:
    for session in sessions:
        assert heads.client.delete(f"/sessions/{session}/state", headers={SESSION_HEADER: session}).status_code == 200


@REST_PATHS
def test_header_names_the_session(heads: InProcess, path: str) -> None:
    def steps(header: str | None, **body: Any) -> int:
        return int(infer(heads, header, path, **body).json()["session"]["steps"])

    assert [steps("a"), steps("a"), steps("b")] == [1, 2, 1]
    assert [steps("a", session="a", start=False), steps(None, session="a", end=True), steps("b", end=True)] == [3, 4, 2]
    assert "session" not in infer(heads, "", path).json()
    for header, field in (("there", "session"), ("stream:1", SESSION_HEADER)):
        refused = infer(heads, header, path, session="here")
        assert (refused.status_code, refused.json()["field"]) == (400, field)
    assert heads.client.delete("/sessions/here/state").status_code == 404, "no session was opened"
    assert "names a session" in infer(heads, "a", path, inputs=[[1], [1]]).json()["error"]
    twice = [(SESSION_HEADER, "a"), (SESSION_HEADER, "a"), *(GENERAL.items() if path == "general" else ())]
    refused = heads.client.post("/infer", json={"model": "accumulator", "inputs": [[1]]}, headers=twice)
    assert (refused.status_code, refused.json()["field"]) == (400, SESSION_HEADER)


@PATHS
def test_header_names_the_sequence_over_rest(heads: InProcess, path: str) -> None:
    """Requests without a session have a remembered form. A session with the same body must not take it."""

    def reply(session: str | None, **parameters: Any) -> dict[str, Any]:
        tensor = {"name": "ids", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
        head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
        headers = (GENERAL if path == "general" else {}) | {"Inference-Header-Content-Length": str(len(head))}
        headers |= {} if session is None else {SESSION_HEADER: session}
        answer = heads.client.post("/v2/models/accumulator/infer", content=head + b"\1\0\0\0", headers=headers)
        size = int(answer.headers.get("Inference-Header-Content-Length", len(answer.content)))
        body: dict[str, Any] = json.loads(answer.content[:size])
        return body

    def steps(session: str | None, **parameters: Any) -> int | None:
        found: int | None = reply(session, **parameters).get("parameters", {}).get("sequence_steps")
        return found

    start = {"sequence_start": True}
    assert [steps(None), steps(None), steps("a", **start), steps("b", **start)] == [None, None, 1, 1]
    assert [steps("a"), steps(None), steps("b")] == [2, None, 2]
    assert [steps("a", sequence_id="a"), steps(None, sequence_id="a"), steps("7", sequence_id=7, **start)] == [3, 4, 1]
    assert reply("a", sequence_id=7)["field"] == "parameters.sequence_id"
    assert reply("stream:1")["field"] == SESSION_HEADER
    close(heads, "a", "b", "7")


def message(**parameters: str | int | bool) -> Any:
    """Return a ModelInferRequest of one step."""
    request = service_pb2.ModelInferRequest(model_name="accumulator", raw_input_contents=[b"\1\0\0\0"])
    request.inputs.add(name="ids", datatype="INT32", shape=[1, 1])
    for name, value in parameters.items():
        kind = {str: "string_param", bool: "bool_param", int: "int64_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


@PATHS
def test_metadata_names_the_sequence(heads: InProcess, path: str) -> None:
    compression = grpc.Compression.Gzip if path == "general" else None
    with grpc.insecure_channel(heads.grpc) as channel:
        method = channel.unary_unary(
            f"{SERVICE}/ModelInfer", service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelInferResponse.FromString
        )

        def steps(request: Any, *sessions: str) -> int:
            metadata = [(SESSION_HEADER, session) for session in sessions]
            answer = method(request, metadata=metadata, timeout=60, compression=compression)
            found: int = answer.parameters["sequence_steps"].int64_param
            return found

        start = message(sequence_start=True)
        assert [steps(message()), steps(message()), steps(start, "a"), steps(start, "b")] == [0, 0, 1, 1]
        assert [steps(message(), "a"), steps(message()), steps(message(sequence_id="a"), "a")] == [2, 0, 3]
        for request, *sessions in ((message(sequence_id=7), "a"), (message(), "stream:1"), (message(), "a", "b")):
            with pytest.raises(grpc.RpcError) as raised:
                steps(request, *sessions)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stream = channel.stream_stream(
            f"{SERVICE}/ModelStreamInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        other = message(sequence_id="b", sequence_start=True)
        answers = list(stream(iter([message(), other, message(sequence_id="a")]), metadata=[(SESSION_HEADER, "a")], timeout=60))
    assert [answer.infer_response.parameters["sequence_steps"].int64_param for answer in answers] == [4, 0, 5]
    assert "sequence_id is b and the header x-session-id is a: " in answers[1].error_message
    close(heads, "a", "b")


def test_handshake_names_the_session(heads: InProcess) -> None:
    url = heads.address.replace("http", "ws") + "/stream?model=accumulator"
    for steps, query in ((1, ""), (2, "&session=a")):
        with connect(url + query, additional_headers={SESSION_HEADER: "a"}, proxy=None) as socket:
            socket.send('{"input": [1]}')
            assert json.loads(socket.recv(timeout=60))["session"] == {"id": "a", "steps": steps}
    for names, field in ((["there"], "session"), (["here"] * 2, SESSION_HEADER), (["stream:1"], SESSION_HEADER)):
        headers = [(SESSION_HEADER, name) for name in names]
        with pytest.raises(InvalidStatus) as raised:
            connect(f"{url}&session=here", additional_headers=headers, proxy=None)
        answer = raised.value.response
        assert (answer.status_code, json.loads(answer.body or b"")["field"]) == (400, field)
    close(heads, "a")


def test_only_routes_of_sessions_refuse_another_session_in_the_header(heads: InProcess) -> None:
    for method, path in (("GET", "state"), ("PUT", "state"), ("DELETE", "state"), ("POST", "fork")):
        answer = heads.client.request(method, f"/sessions/a/{path}", headers={SESSION_HEADER: "b"})
        assert (answer.status_code, answer.json()["field"]) == (400, "session")
    for path in ("/models", "/v2/models/accumulator", "/readyz", "/metrics"):
        assert heads.client.get(path, headers={SESSION_HEADER: "stream:1"}).status_code == 200
