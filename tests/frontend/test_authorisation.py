"""Every endpoint with every kind of key, and on its port: each is found by introspection, so that a new one cannot be forgotten."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any, cast
from urllib.parse import urlsplit

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from service.access.keys import create
from service.access.scopes import Scope
from service.errors import SettingsError
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.oip.protobuf import METHODS, SERVICE
from service.frontend.rest.app import build_app
from service.frontend.rest.docs_page import STYLE
from service.frontend.rest.scopes import ADMIN_PORT_SCOPES, GRPC_SCOPES, HTTP_SCOPES, grpc_scope
from service.metrics import Metrics
from service.settings import load
from tests import raw_websocket
from tests.frontend.conftest import AtOnce, Guarded, bearer
from tests.frontend.in_process import InProcess, frontend_of, in_process
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
        assert status in (400, 401, 404, 405), target


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


# With an admin port, administration, traces and metrics are there, and nowhere else.

BODY = b'{"model": "words", "inputs": ["how far is the sea ?"]}'
CONNECTIONS = 8
FILES = {"/docs/{name}": STYLE, "/ui/{name}": "style.css"}


@pytest.fixture(scope="module")
def divided(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    limits: dict[str, Any] = {"max_connections": CONNECTIONS, "idle_seconds": 60, "debug": True}
    with in_process(models_folder, tmp_path_factory.mktemp("log"), admin=True, **limits) as running:
        yield running


@pytest.fixture(scope="module")
def admin(divided: InProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=divided.admin, timeout=30, trust_env=False) as client:
        yield client


def test_endpoint_is_on_its_ports_alone(divided: InProcess, admin: httpx.Client) -> None:
    """A path that a port lacks looks like a path that does not exist."""
    for method, path in ENDPOINTS:
        scope, filled = scope_of(method, path), re.sub(r"\{\w+(:path)?\}", FILES.get(path, "1"), path)
        on_admin = scope in ADMIN_PORT_SCOPES | {Scope.PUBLIC}
        for client, served in ((divided.client, scope not in ADMIN_PORT_SCOPES), (admin, on_admin)):
            answer, unknown = (client.request(method, target) for target in (filled, "/no/such/path"))
            assert (answer.text != unknown.text) is served, (method, path)
            assert served or answer.status_code == unknown.status_code == 404
    main, administration = (set(client.get("/openapi.json").json()["paths"]) for client in (divided.client, admin))
    assert "/metrics" in administration - main and "/infer" in main - administration and "/readyz" in main & administration
    assert admin.post("/infer", content=BODY, headers={"connection": "close"}).status_code == 404
    with pytest.raises(InvalidStatus):
        connect(divided.admin.replace("http", "ws") + "/stream?model=sensors", proxy=None)
    with grpc.insecure_channel(divided.grpc) as channel:
        for change in ("RepositoryModelLoad", "RepositoryModelUnload"):
            with pytest.raises(grpc.RpcError, match="on the admin port of this service") as refused:
                channel.unary_unary(f"/inference.GRPCInferenceService/{change}")(b"", timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_full_main_port_leaves_room_for_administrators(divided: InProcess) -> None:
    """All connections of the main port have a request that runs: none of them closes to make room."""
    with ExitStack() as stack:
        with divided.held() as engine:
            clients = [stack.enter_context(raw_websocket.connection(divided)) for _ in range(CONNECTIONS)]
            for client in clients:
                client.sendall(request(BODY))
            eventually(lambda: len(engine.waiting) == CONNECTIONS)
            before, (host, _, port) = divided._server._open_connections, urlsplit(divided.admin).netloc.rpartition(":")
            silent = stack.enter_context(socket.create_connection((host, int(port)), 60))
            eventually(lambda: divided._server._open_connections > before)
            assert not divided.call(lambda: divided._server._make_room(0)), "a client of the main port waits"
            silent.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert silent.recv(1 << 12).startswith(b"HTTP/1.1 200")
            assert httpx.get(f"{divided.admin}/healthz", timeout=60, trust_env=False).status_code == 200
        assert all(client.recv(1 << 12).startswith(b"HTTP/1.1 200") for client in clients)


def test_keys_count_on_the_admin_port(models_folder: Path, tmp_path: Path, guarded: Guarded) -> None:
    with in_process(models_folder, tmp_path, admin=True, keys=str(guarded.file)) as service:
        service.frontend.access.refused_keys = AtOnce()
        for token, status in ((None, 401), (guarded.scoped[Scope.INFER], 403), (guarded.scoped[Scope.METRICS], 200)):
            assert httpx.get(f"{service.admin}/metrics", headers=bearer(token), trust_env=False).status_code == status


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({name: 9000, "admin_port": 9000}, f"{name} and admin_port are both 9000") for name in ("port", "grpc_port")),
        ({"port": 9000, "grpc_port": 9000}, "port and grpc_port are both 9000"),
        ({"admin_port": 70000}, "use off, or a port from 0 to 65535"),
        ({"admin_port": "on"}, "use off, or a port"),
    ],
)
def test_impossible_ports_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(values, {})
