"""Every endpoint with every kind of key: each is found by introspection, so that a new one cannot be forgotten."""

from __future__ import annotations

import re
from contextlib import ExitStack
from queue import Queue
from typing import Any, cast

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from service.access.keys import create
from service.access.scopes import Scope
from service.frontend.app import build_app
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.oip.protobuf import METHODS, SERVICE
from service.frontend.scopes import GRPC_SCOPES, HTTP_SCOPES, grpc_scope
from service.metrics import Metrics
from tests import raw_websocket
from tests.frontend.conftest import Guarded, bearer
from tests.frontend.in_process import InProcess, frontend_of
from tests.frontend.test_hot_path import exchange, request, through_the_general_path
from tests.serving import eventually, rewrite

REFUSES_WRONG_KEYS = {"/access"}
"""The public endpoint that tells a caller the rights of its key."""
OPEN_PAGES = {"/openapi.json"}
"""The route of FastAPI itself: the description of the service, which is the same for every client."""


def routes() -> list[APIRoute]:
    """Return the routes of the service."""
    metrics = Metrics()
    app = build_app(frontend_of(Dispatcher(metrics, 1, lambda: None), metrics))
    found = [context.original_route for context in iter_route_contexts(app.routes)]
    assert {route.path for route in found if isinstance(route, Route) and not isinstance(route, APIRoute)} == OPEN_PAGES
    assert {route.path for route in found if isinstance(route, WebSocketRoute)} == {"/stream", "/{path:path}"}
    return [route for route in found if isinstance(route, APIRoute)]


ENDPOINTS = [(method, route.path) for route in routes() for method in sorted(route.methods or ())]


def scope_of(method: str, path: str) -> Scope:
    scopes = HTTP_SCOPES[path]
    return scopes if isinstance(scopes, Scope) else scopes[method]


def test_scopes_are_those_of_the_routes() -> None:
    assert HTTP_SCOPES.keys() == {path for _, path in ENDPOINTS}
    assert GRPC_SCOPES.keys() == METHODS.keys()


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_endpoint_admits_the_keys_with_its_scope_and_no_others(method: str, path: str, guarded: Guarded) -> None:
    filled, needed = re.sub(r"\{\w+(:path)?\}", "1", path), scope_of(method, path)
    allowed = {Scope.SESSION} if needed is Scope.STATE else {needed}
    for token in (None, "wrong", f"{'0' * 16}.{'0' * 43}"):
        answer = guarded.send(method, filled, token)
        refused = needed is not Scope.PUBLIC or (path in REFUSES_WRONG_KEYS and token is not None)
        assert (answer.status_code == 401) is refused, answer.text
        if answer.status_code == 401:
            assert (answer.json()["code"], answer.headers["www-authenticate"]) == ("unauthorized", "Bearer")
    for scope, token in guarded.scoped.items():
        answer = guarded.send(method, filled, token)
        admitted = needed is Scope.PUBLIC or scope in allowed
        assert (answer.status_code == 403) is not admitted, (scope, answer.text)
        assert answer.status_code != 401 and answer.headers.get_list("x-content-type-options") == ["nosniff"]


def test_grpc_method_admits_the_keys_with_its_scope_and_no_others(guarded: Guarded) -> None:
    others = ("/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    for path in (*(f"/{SERVICE}/{name}" for name in METHODS), *others):
        needed = grpc_scope(path)
        for token in (None, "wrong"):
            status = grpc_status(guarded, path, token)
            assert (status is grpc.StatusCode.UNAUTHENTICATED) is (needed is not Scope.PUBLIC), path
        for scope, token in guarded.scoped.items():
            admitted = needed in (Scope.PUBLIC, scope)
            assert (grpc_status(guarded, path, token) is grpc.StatusCode.PERMISSION_DENIED) is not admitted, path


def grpc_status(guarded: Guarded, path: str, token: str | None) -> grpc.StatusCode:
    """Return the status of a call with an empty message, or without a message for a method that takes a stream."""
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(guarded.local.grpc) as channel:
        try:
            list(channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=60))
        except grpc.RpcError as error:
            return cast(grpc.StatusCode, error.code())
    return grpc.StatusCode.OK


SPELLINGS = (
    *("//{}", "/{}/", "/./{}", "/../{}", "/x/../{}", "/%2f{}", "/{};x", "/{}?x", "/{}%00", "/{}%20", "/{}#x", "/%2e/{}"),
    "http://localhost/{}",
)
OVERRIDES = "X-Original-URL: /healthz\r\nX-Rewrite-URL: /healthz\r\nX-HTTP-Method-Override: GET\r\n"


@pytest.mark.parametrize("path", ["v2/repository/models/words/unload", "infer"])
def test_other_spellings_of_a_path_admit_nobody(path: str, guarded: Guarded) -> None:
    spellings = [spelling.format(path) for spelling in SPELLINGS]
    for target in (*spellings, f"/{path.upper()}", f"/%{ord(path[0]):02x}{path[1:]}"):
        with raw_websocket.connection(guarded.local) as client:
            lines = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n{OVERRIDES}"
            client.sendall(f"{lines}\r\n{{}}".encode())
            status = int(client.recv(1 << 16).split(b" ")[1])
        assert status in (307, 400, 401, 404, 405), target  # 307 leads to the path without its last slash


def test_sessions_of_other_tenants_look_unknown(guarded: Guarded) -> None:
    sales, support = guarded.tenants["sales"], guarded.tenants["support"]
    assert guarded.chunk(sales, "1", start=True).json()["session"]["steps"] == 3
    unknown, foreign = (guarded.chunk(support, id, start=False) for id in ("never", "1"))
    assert (unknown.status_code, foreign.status_code) == (404, 404)
    assert unknown.text.replace("never", "1") == foreign.text
    for method, path in (("GET", "state"), ("DELETE", "state"), ("POST", "fork")):
        body: dict[str, Any] = {"json": {"session": "copy"}} if path == "fork" else {}
        unknown, foreign = (guarded.send(method, f"/sessions/{id}/{path}", support, **body) for id in ("never", "1"))
        assert unknown.status_code == foreign.status_code == 404
        assert unknown.text.replace("never", "1") == foreign.text
    # The same id names a separate session of each tenant, and they do not affect each other.
    assert guarded.chunk(support, "1").json()["session"] == {"id": "1", "steps": 3}
    assert guarded.chunk(sales, "1", start=False).json()["session"]["steps"] == 6
    assert guarded.send("DELETE", "/sessions/1/state", sales).status_code == 200
    assert guarded.chunk(support, "1", end=True).json()["session"]["steps"] == 6


def test_tenant_may_not_open_more_sessions_than_its_key_allows(guarded: Guarded) -> None:
    few = guarded.tenants["few"]
    assert [guarded.chunk(few, id).status_code for id in "abc"] == [200, 200, 429]
    state = guarded.send("GET", "/sessions/a/state", few).content
    refused = guarded.send("PUT", "/sessions/c/state", few, content=state)
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_sessions") and "retry-after" in refused.headers
    assert guarded.chunk(guarded.tenants["sales"], "c", end=True).status_code == 200
    assert [guarded.chunk(few, id, end=True).status_code for id in "acb"] == [200, 200, 200]


def test_revoked_key_ends_its_open_streams(guarded: Guarded) -> None:
    """And its requests. A stream of another key stays open."""
    before = guarded.file.read_text()
    token = create(guarded.file, "brief", [Scope.INFER, Scope.SESSION], "brief")
    url = guarded.address.replace("http", "ws") + "/stream?model=sensors"
    eventually(lambda: guarded.infer(token).status_code == 200)
    with ExitStack() as stack:
        ended, kept = (
            stack.enter_context(connect(url, additional_headers=bearer(key), proxy=None))
            for key in (token, guarded.tenants["sales"])
        )
        client = stack.enter_context(triton.InferenceServerClient(guarded.local.grpc))
        results: Queue[Any] = Queue()
        client.start_stream(lambda **reply: results.put(reply["error"]), headers=bearer(token))
        tensor = triton.InferInput("inputs", [1, 1, 3], "FP32").set_data_from_numpy(np.ones((1, 1, 3), np.float32))
        client.async_stream_infer("sensors", [tensor])
        assert results.get(timeout=60) is None
        rewrite(guarded.file, before)
        with pytest.raises(ConnectionClosed) as closed:
            ended.recv(timeout=60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        assert closed.value.rcvd.reason == "the key brief was revoked: connect with another key"
        assert "the key brief was revoked" in str(results.get(timeout=60))
        kept.send('{"input": [[1, 2, 3]]}')
        assert '"outputs"' in str(kept.recv(timeout=60))
    assert guarded.infer(token).status_code == 401 and guarded.infer(guarded.tenants["sales"]).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"), [("/infer", 401), ("/v2/models/words/versions/7/infer", 401), ("/v2/models/a/b/infer", 404)]
)
@pytest.mark.parametrize("key", ["", "Authorization: Bearer wrong\r\n", "Authorization: Basic eDp5\r\n"])
def test_both_paths_refuse_a_key_with_the_same_bytes(path: str, status: int, key: str, guarded: Guarded) -> None:
    """The counters grow alike too, and the next request on the connection is answered."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    message = request(b"{}", head=f"{head}{key}".encode())
    outcomes = []
    for each in (message, through_the_general_path(message)):
        names = ("seqserve_denied_total", "seqserve_requests_accepted_total")
        before = [guarded.local.metric(name) for name in names]
        reply = exchange(guarded.local, each)
        outcomes.append((reply, [guarded.local.metric(name) - count for name, count in zip(names, before, strict=True)]))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].startswith(b"HTTP/1.1 %d " % status) and outcomes[0][1] == [status == 401, 0]
    valid = request(b"{}", head=f"{head}Authorization: Bearer {guarded.scoped[Scope.INFER]}\r\n".encode())
    assert exchange(guarded.local, message + valid, replies=2) == outcomes[0][0] + exchange(guarded.local, valid)


def test_administration_and_refusals_are_logged(guarded: Guarded) -> None:
    def logged() -> list[tuple[str, str, str]]:
        since = guarded.local.log_bytes
        guarded.send("POST", "/v2/repository/models/words/load", guarded.scoped[Scope.ADMIN])
        guarded.send("POST", "/v2/repository/models/words/unload", guarded.scoped[Scope.INFER])
        guarded.infer("wrong")
        guarded.infer(guarded.tenants["sales"])
        entries = guarded.local.events("audit", since=since)
        assert {entry["peer"] for entry in entries} == {"127.0.0.1"}
        return [(entry["caller"], entry["action"], entry["outcome"]) for entry in entries]

    expected = [
        ("only-admin", "POST /v2/repository/models/words/load", "ok"),
        ("only-infer", "POST /v2/repository/models/words/unload", "forbidden"),
        ("anybody", "POST /infer", "unauthorized"),
    ]
    # The refusals of other tests may have reached the cap on such lines, for some seconds.
    eventually(lambda: logged() == expected)
    assert not any(token in guarded.local.log_file.read_text() for token in guarded.scoped.values())


def test_web_pages_of_others_reach_nothing(local: InProcess) -> None:
    """Pages that post text from another origin, or that point their own name at this machine."""
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        for path in ("/infer", "/v2/repository/models/words/unload"):
            answer = local.client.post(path, content=b"{}", headers={"content-type": "text/plain", **headers})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        handshake = raw_websocket.handshake()
        if "host" in headers:
            handshake = handshake.replace(b"Host: localhost\r\n", b"")
        with raw_websocket.connection(local) as socket:
            socket.sendall(handshake.replace(b"Connection:", lines + b"Connection:"))
            assert socket.recv(1 << 16).startswith(b"HTTP/1.1 403 ")
    assert local.client.get("/healthz", headers={"host": "evil.example"}).status_code == 200
