"""Clients fill the memory that a control group of the kernel allows the service. It refuses them, and the kernel kills nothing.

`make test-all` runs it. The memory that is in use without clients is BASE_SHARE of the limit, on every machine.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
import numpy as np
import pytest

from loadtest import oip_requests
from tests import models
from tests.long.environment import MemoryGroup, memory_group
from tests.planted import constants
from tests.raw_websocket import connection, handshake
from tests.serving import LIMIT_SECONDS, Server, eventually, serving

BASE_SHARE, SHED_SHARE, REFUSE_SHARE = 0.6, 0.85, 0.95
MOST = 1 << 30
"""The limit of bodies does not matter here."""
STATE_NUMBERS = 1 << 16
BODIES, BODY_BYTES = 60, 8 << 20
SMALL = [[1.0, 2.0, 3.0]]
LARGE = [[0.5, 1.5, 2.5]] * 10_000
HEAD = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models.sensors(root)
    qrnn = {"kind": "qrnn", "hidden": STATE_NUMBERS}
    head = {"kind": "classify", "pool": ["last"], "labels": ["low", "high"]}
    models.made_up(root, "wide", {"kind": "features", "features": 1, "max_steps": 64}, qrnn, head=head)
    return root


@pytest.fixture
def crowded(folder: Path, tmp_path: Path) -> Iterator[tuple[Server, MemoryGroup]]:
    """A server whose control group has a limit. After the test, nothing was killed, and everything is served again."""
    variables = {"max_memory_share": str(REFUSE_SHARE), "session_idle_seconds": "600", "state_slots": "64"}
    with (
        constants({"service.frontend.guards.body_budget.MAX_RECEIVING_BYTES": MOST}),
        memory_group("seqserve-limited") as group,
        serving(folder, tmp_path, program=group.program, drain_seconds="1", **variables) as server,
    ):
        assert server.infer("sensors", [LARGE]).status_code == 200  # its decoder belongs to the base
        group.limit_to(BASE_SHARE)
        yield server, group
        assert (group.kills(), server.events("child ended")) == (0, [])
        eventually(lambda: server.infer("sensors", [LARGE]).status_code == 200)
        eventually(lambda: server.infer("sensors", [SMALL], session="after", end=True).status_code == 200)
        assert call(server, LARGE) is None
        assert server.metric("seqserve_memory_limit_used_ratio") < SHED_SHARE


def call(server: Server, rows: list[list[float]]) -> grpc.StatusCode | None:
    """Return the status of a call of ModelInfer, None for success."""
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(oip_requests.PATH)
        try:
            infer(oip_requests.message("sensors", np.asarray(rows, np.float32)), timeout=LIMIT_SECONDS)
        except grpc.RpcError as error:
            return error.code()
    return None


def connect(server: Server, held: ExitStack) -> socket.socket:
    address = urlsplit(server.address)
    client = held.enter_context(closing(socket.socket()))
    client.settimeout(LIMIT_SECONDS)
    client.connect((address.hostname, address.port))
    return client


def replies(clients: list[socket.socket]) -> list[bytes]:
    """Return the replies to the clients that the service has answered."""
    received = []
    for client in select.select(clients, [], [], 0)[0]:
        with suppress(OSError):
            received.append(client.recv(1 << 16))
    return received


def send_bodies(server: Server, held: ExitStack) -> list[socket.socket]:
    """Send BODIES large bodies, each without its last byte. The service may end a connection meanwhile."""
    clients = []
    for _ in range(BODIES):
        client = connect(server, held)
        clients.append(client)
        with suppress(OSError):
            client.sendall(HEAD % BODY_BYTES + bytes(BODY_BYTES - 1))
    return clients


def check_shed(server: Server) -> None:
    """Check that the service sheds, and answers everything else."""
    refused = server.infer("sensors", [LARGE])
    assert is_refusal(refused), refused.text
    assert is_refusal(server.infer("sensors", [SMALL], session="new"))
    with connection(server) as client:
        client.sendall(handshake())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    assert call(server, LARGE) is grpc.StatusCode.UNAVAILABLE
    assert server.infer("sensors", [SMALL]).status_code == 200
    assert call(server, SMALL) is None
    for path in ("/healthz", "/readyz", "/metrics", "/models", "/v2/health/ready"):
        assert server.client.get(path).status_code == 200
    assert server.client.post("/v2/repository/index", json={}).status_code == 200
    assert server.metric("seqserve_refused_total", reason="memory") > 0


def is_refusal(reply: httpx.Response) -> bool:
    return (reply.status_code, reply.json()["code"], "retry-after" in reply.headers) == (503, "overloaded", True)


def test_large_bodies_are_refused_before_the_limit(crowded: tuple[Server, MemoryGroup]) -> None:
    """Open sessions continue meanwhile."""
    server, group = crowded
    assert server.infer("sensors", [SMALL], session="open", start=True).status_code == 200
    with ExitStack() as held:
        clients = send_bodies(server, held)
        eventually(lambda: server.metric("seqserve_memory_limit_used_ratio") > SHED_SHARE - 0.03)
        refusals = replies(clients)
        assert 10 < len(refusals) < BODIES
        assert all(reply.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: " in reply for reply in refusals if reply)
        assert any(b'"code":"overloaded"' in reply for reply in refusals)
        with group.ballast(SHED_SHARE + 0.03):
            eventually(lambda: server.metric("seqserve_memory_limit_used_ratio") >= SHED_SHARE)
            check_shed(server)
            assert server.infer("sensors", [SMALL], session="open", start=False).status_code == 200
    assert server.infer("sensors", [SMALL], session="open", start=False, end=True).status_code == 200


def test_sessions_do_not_fill_the_memory(crowded: tuple[Server, MemoryGroup]) -> None:
    server, _ = crowded
    opened = 0
    while (reply := server.infer("wide", [[[1.0]]], session=f"s{opened}")).status_code == 200:
        opened += 1
    assert is_refusal(reply), reply.text
    assert server.infer("wide", [[[1.0]]], session="s0", start=False).status_code == 200
    for number in range(opened):
        assert server.infer("wide", [[[1.0]]], session=f"s{number}", start=False, end=True).status_code == 200
