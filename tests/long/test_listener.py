"""Connections are spread over the frontends of a running service, and a frontend that hangs or ends holds none."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from tests.frontend.http2.peer import PREFACE, settings
from tests.serving import LIMIT_SECONDS, Server, eventually, serving
from tests.steady import processes

FRONTENDS, CONNECTIONS = 8, 64
HTTP = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
GRPC = PREFACE + settings()
ESTABLISHED = "01"


@pytest.fixture(scope="module")
def many(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, count = tmp_path_factory.mktemp("log"), str(FRONTENDS)
    with serving(models_folder, folder, "--frontends", count, "--device", "cpu", idle_seconds="600") as running:
        running.client.close()
        yield running


def connect(address: str, hello: bytes) -> socket.socket:
    host, _, port = address.removeprefix("http://").rpartition(":")
    client = socket.create_connection((host, int(port)), LIMIT_SECONDS)
    client.sendall(hello)
    return client


def connections(server: Server, address: str) -> dict[str, int]:
    """Return the number of connections to a port of the service that each frontend has accepted."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    accepted = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(port) and line[3] == ESTABLISHED}
    frontends = {name: pid for name, pid in processes(server).items() if name.startswith("frontend")}
    return {name: len(accepted & sockets(pid)) for name, pid in frontends.items()}


def sockets(pid: int) -> set[str]:
    """Return the sockets of a process."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(file.readlink()))
    return found


@pytest.mark.parametrize("at_once", [False, True], ids=["one after another", "at once"])
@pytest.mark.parametrize(("port", "hello"), [("address", HTTP), ("grpc", GRPC)], ids=["HTTP", "gRPC"])
def test_frontends_share_the_connections_of_a_port(many: Server, port: str, hello: bytes, at_once: bool) -> None:
    address = getattr(many, port)
    eventually(lambda: not any(connections(many, address).values()))
    with ExitStack() as clients:
        opened = []
        for _ in range(CONNECTIONS):
            opened.append(clients.enter_context(closing(connect(address, hello))))
            if not at_once:
                assert opened[-1].recv(1 << 16)
        if at_once:
            assert all(client.recv(1 << 16) for client in opened)
        spread = connections(many, address).values()
    assert sum(spread) == CONNECTIONS
    assert max(spread) <= 3 * CONNECTIONS / FRONTENDS, spread


def test_hanging_and_ended_frontends_hold_no_connection(many: Server) -> None:
    eventually(lambda: not any(connections(many, many.address).values()))
    hanging, ended = many.pid("frontend-0"), many.pid("frontend-1")
    os.kill(hanging, signal.SIGSTOP)
    os.kill(ended, signal.SIGKILL)
    with ExitStack() as clients:
        for _ in range(CONNECTIONS):
            client = clients.enter_context(closing(connect(many.address, HTTP)))
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    os.kill(hanging, signal.SIGCONT)
    eventually(lambda: many.pid("frontend-1") != ended)
