"""With an admin port, administration, traces and metrics are there, and nowhere else."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.access.keys import create
from service.access.scopes import KEY_SCOPES, Scope
from service.errors import SettingsError
from service.frontend.docs_page import STYLE
from service.frontend.scopes import ADMIN_PORT_SCOPES
from service.settings import load
from tests.frontend.test_authorisation import ENDPOINTS, scope_of
from tests.planted import constants
from tests.serving import Server, eventually, serving

QUESTION = "how far is the sea ?"
CONNECTIONS = 8
FILES = {"/docs/{name}": STYLE, "/ui/{name}": "style.css"}


@pytest.fixture(scope="module")
def divided(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {"max_connections": str(CONNECTIONS), "idle_seconds": "60"}
    flags, scratch = ("--admin-port", "0", "--debug"), tmp_path_factory.mktemp("log")
    with (
        constants({"service.frontend.connection_guard.RECEIVE_SECONDS": 60}),
        serving(models_folder, scratch, *flags, **limits) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def admin(divided: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=divided.admin, timeout=30, trust_env=False) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_endpoint_is_on_its_ports_alone(method: str, path: str, divided: Server, admin: httpx.Client) -> None:
    """A path that a port lacks looks like a path that does not exist."""
    name, scope = FILES.get(path, "1"), scope_of(method, path)
    filled = re.sub(r"\{\w+(:path)?\}", name, path)
    for client, served in (
        (divided.client, scope not in ADMIN_PORT_SCOPES),
        (admin, scope in ADMIN_PORT_SCOPES | {Scope.PUBLIC}),
    ):
        answer, unknown = (client.request(method, target) for target in (filled, "/no/such/path"))
        assert unknown.status_code == 404
        if not served:
            assert (answer.status_code, answer.text) == (404, unknown.text)
        else:
            assert answer.text != unknown.text


def test_models_are_loaded_and_measured_on_the_admin_port(divided: Server, admin: httpx.Client) -> None:
    assert admin.post("/v2/repository/models/words/load").status_code == 200
    assert divided.infer("words", [QUESTION]).status_code == 200
    assert "seqserve_requests_total" in admin.get("/metrics").text
    assert {event["action"] for event in divided.events("audit")} >= {"POST /v2/repository/models/words/load"}


def test_inference_is_not_on_the_admin_port(divided: Server, admin: httpx.Client) -> None:
    body = {"model": "words", "inputs": [QUESTION]}
    for headers in ({}, {"connection": "close"}):
        assert admin.post("/infer", json=body, headers=headers).status_code == 404
    with pytest.raises(InvalidStatus), connect(divided.admin.replace("http", "ws") + "/stream?model=sensors"):
        pass


def test_documents_describe_their_port(divided: Server, admin: httpx.Client) -> None:
    main, administration = (set(client.get("/openapi.json").json()["paths"]) for client in (divided.client, admin))
    assert "/metrics" in administration - main and "/infer" in main - administration
    assert "/readyz" in main & administration


def test_grpc_names_the_admin_port(divided: Server) -> None:
    with triton.InferenceServerClient(divided.grpc) as client:
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="on the admin port of this service") as refused:
                change("words")
            assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
        assert client.is_model_ready("words")


def test_full_main_port_leaves_room_for_administrators(divided: Server) -> None:
    """All connections of the main port have a request that runs: none of them closes to make room."""
    body = json.dumps({"model": "words", "inputs": [QUESTION], "deadline_ms": 60_000}).encode()
    head = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    place, engine = urlsplit(divided.address), divided.pid("engine-0")
    with ExitStack() as stack:
        os.kill(engine, signal.SIGSTOP)
        stack.callback(_resume, engine)
        clients = [stack.enter_context(socket.create_connection((place.hostname, place.port), 60)) for _ in range(CONNECTIONS)]
        for client in clients:
            client.sendall(head + body)
        answer = httpx.get(f"{divided.admin}/healthz", timeout=60, trust_env=False)
        _resume(engine)
        assert answer.status_code == 200
        assert all(client.recv(1 << 12).startswith(b"HTTP/1.1 ") for client in clients)


def test_admin_port_closes_with_the_others(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--admin-port", "0", lame_duck_seconds="0") as server:
        place = urlsplit(server.admin)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: _refuses(place.hostname or "", place.port or 0))


def _resume(engine: int) -> None:
    """Let a stopped engine continue, unless it was restarted because it hung."""
    with suppress(ProcessLookupError):
        os.kill(engine, signal.SIGCONT)


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 10).close()
    except ConnectionRefusedError:
        return True
    return False


def test_keys_count_on_the_admin_port(models_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    tokens = {scope: create(file, f"only-{scope}", [scope], "scoped") for scope in KEY_SCOPES}
    at_once = constants({"service.access.refused_keys.DELAY_SECONDS": 0})
    with at_once, serving(models_folder, tmp_path, "--keys", str(file), "--admin-port", "0") as server:
        for method, path in ENDPOINTS:
            scope = scope_of(method, path)
            if scope not in ADMIN_PORT_SCOPES or path == "/debug/trace":
                continue
            for sent, token in ((None, None), *tokens.items()):
                headers = {} if token is None else {"authorization": f"Bearer {token}"}
                answer = httpx.request(method, server.admin + path.format(name="1"), headers=headers, trust_env=False)
                expected = {None: {401}, scope: {200, 400, 404}}.get(sent, {403})
                assert answer.status_code in expected, (path, sent, answer.text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 9000, "admin_port": 9000}, "port and admin_port are both 9000"),
        ({"grpc_port": 9000, "admin_port": 9000}, "grpc_port and admin_port are both 9000"),
        ({"admin_port": 70000}, "use off, or a port from 0 to 65535"),
        ({"admin_port": "on"}, "use off, or a port"),
    ],
)
def test_impossible_ports_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(values, {})
