"""With an admin port, administration, traces and metrics are there, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.access.scopes import Scope
from service.errors import SettingsError
from service.frontend.docs_page import STYLE
from service.frontend.scopes import ADMIN_PORT_SCOPES
from service.settings import load
from tests.frontend.conftest import AtOnce, Guarded, bearer
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.test_authorisation import ENDPOINTS, scope_of
from tests.frontend.test_hot_path import request
from tests.raw_websocket import connection
from tests.serving import eventually

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
            clients = [stack.enter_context(connection(divided)) for _ in range(CONNECTIONS)]
            for client in clients:
                client.sendall(request(BODY))
            eventually(lambda: len(engine.waiting) == CONNECTIONS)
            assert httpx.get(f"{divided.admin}/healthz", timeout=60, trust_env=False).status_code == 200
        assert all(client.recv(1 << 12).startswith(b"HTTP/1.1 200") for client in clients)


def test_keys_count_on_the_admin_port(models_folder: Path, tmp_path: Path, guarded: Guarded) -> None:
    with in_process(models_folder, tmp_path, admin=True, keys=str(guarded.file)) as service:
        service.frontend.refused_keys = AtOnce()
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
