"""The header x-session-id names the session of a request, over every protocol and on every path."""

from __future__ import annotations

import json
from collections.abc import Callable

import grpc
import pytest
from tritonclient.grpc import service_pb2
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.errors import InvalidInput
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.run.session_header import SESSION_HEADER, header_session, resolve_session
from tests.frontend.in_process import InProcess

REFUSED, SERVICE = "refused", "/inference.GRPCInferenceService"
Chunk = Callable[[InProcess, str, list[tuple[str, str]], str | None, bool], int | str]
"""Sends a chunk of one step by a path, with some headers and the session that the request names, perhaps as the first chunk.

Returns the steps of the session, 0 without one, or REFUSED.
"""


def test_header_is_empty_or_the_one_session_of_the_request() -> None:
    assert [header_session(values) for values in ([], [""], ["pump 7"])] == [None, None, "pump 7"]
    for values in (["stream:1"], ["x" * 129], ["a", "a"]):
        with pytest.raises(InvalidInput) as refused:
            header_session(values)
        assert refused.value.field == SESSION_HEADER
    pairs = (("a", None), (None, "a"), ("a", "a"))
    assert [resolve_session(named, header, "session") for named, header in pairs] == ["a"] * 3
    with pytest.raises(InvalidInput, match=r"^session is here and the header x-session-id is there: send the same") as refused:
        resolve_session("here", "there", "session")
    assert refused.value.field == "session"


def infer(heads: InProcess, path: str, headers: list[tuple[str, str]], named: str | None, start: bool) -> int | str:
    body = json.dumps({"model": "accumulator", "inputs": [[1]], **({"session": named} if named else {})})
    padding = " " * MAX_LOOP_BODY_BYTES * (path == "decoder")
    general = [("TE", "trailers")] * (path == "general")
    answer = heads.client.post("/infer", content=body + padding, headers=[*headers, *general])
    assert answer.status_code in (200, 400)
    return int(answer.json().get("session", {"steps": 0})["steps"]) if answer.status_code == 200 else REFUSED


def rest(heads: InProcess, path: str, headers: list[tuple[str, str]], named: str | None, start: bool) -> int | str:
    """Requests without a session have a remembered form. A session with the same body must not take it."""
    tensor = {"name": "ids", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
    parameters = {**({"sequence_id": named} if named else {}), **({"sequence_start": True} if start else {})}
    head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    more = [("TE", "trailers")] * (path == "general") + [("Inference-Header-Content-Length", str(len(head)))]
    answer = heads.client.post("/v2/models/accumulator/infer", content=head + b"\1\0\0\0", headers=[*headers, *more])
    if answer.status_code == 400:
        return REFUSED
    size = int(answer.headers.get("Inference-Header-Content-Length", len(answer.content)))
    return int(json.loads(answer.content[:size]).get("parameters", {}).get("sequence_steps", 0))


def over_grpc(heads: InProcess, path: str, headers: list[tuple[str, str]], named: str | None, start: bool) -> int | str:
    request = service_pb2.ModelInferRequest(model_name="accumulator", raw_input_contents=[b"\1\0\0\0"])
    request.inputs.add(name="ids", datatype="INT32", shape=[1, 1])
    if named:
        request.parameters["sequence_id"].string_param = named
    if start:
        request.parameters["sequence_start"].bool_param = True
    response = service_pb2.ModelStreamInferResponse()
    data, options = request.SerializeToString(), {"metadata": headers, "timeout": 60}
    with grpc.insecure_channel(heads.grpc) as channel:
        try:
            if path == "stream":
                response.ParseFromString(next(channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter([data]), **options)))
            else:
                compression = grpc.Compression.Gzip if path == "general" else None
                call = channel.unary_unary(f"{SERVICE}/ModelInfer")
                response.infer_response.ParseFromString(call(data, compression=compression, **options))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            return REFUSED
    return REFUSED if response.error_message else response.infer_response.parameters["sequence_steps"].int64_param


def socket(heads: InProcess, path: str, headers: list[tuple[str, str]], named: str | None, start: bool) -> int | str:
    url = f"{heads.address.replace('http', 'ws')}/stream?model=accumulator" + (f"&session={named}" if named else "")
    try:
        with connect(url, additional_headers=headers, proxy=None) as stream:
            stream.send('{"input": [1]}')
            return int(json.loads(stream.recv(timeout=60))["session"]["steps"])
    except InvalidStatus as refused:
        assert refused.response.status_code == 400
        return REFUSED


@pytest.mark.parametrize(
    ("chunk", "path"),
    [
        *((infer, path) for path in ("hot", "general", "decoder")),
        *((rest, path) for path in ("hot", "general")),
        *((over_grpc, path) for path in ("hot", "general", "stream")),
        (socket, ""),
    ],
)
def test_header_names_the_session(heads: InProcess, chunk: Chunk, path: str) -> None:
    def steps(*values: str, named: str | None = None, start: bool = False) -> int | str:
        return chunk(heads, path, [(SESSION_HEADER, value) for value in values], named, start)

    assert [steps("a", start=True), steps("a"), steps("b", start=True), steps("a"), steps("b")] == [1, 2, 1, 3, 2]
    assert [steps("a", named="a"), steps(named="a")] == [4, 5]
    assert [steps("there", named="here"), steps("stream:1"), steps("a", "a")] == [REFUSED] * 3
    assert [steps(""), steps()] == [1 if chunk is socket else 0] * 2
    deleted = [heads.client.delete(f"/sessions/{name}/state", headers={SESSION_HEADER: name}) for name in ("a", "b", "here")]
    assert [answer.status_code for answer in deleted] == [200, 200, 404], "no other session was opened"


def test_only_requests_to_a_session_refuse_the_header(heads: InProcess) -> None:
    for method, path in (("GET", "state"), ("PUT", "state"), ("DELETE", "state"), ("POST", "fork")):
        answer = heads.client.request(method, f"/sessions/a/{path}", headers={SESSION_HEADER: "b"})
        assert (answer.status_code, answer.json()["field"]) == (400, "session")
    for path in ("/models", "/v2/models/accumulator", "/readyz", "/metrics"):
        assert heads.client.get(path, headers={SESSION_HEADER: "stream:1"}).status_code == 200
    body = {"model": "accumulator", "inputs": [[1], [1]]}
    assert "names a session" in heads.client.post("/infer", json=body, headers={SESSION_HEADER: "a"}).json()["error"]
