"""The service opens no connections. Audit hooks record the connections of Python code; a list of sockets shows those of libraries.

The sockets are listed every few milliseconds: the test may miss a shorter connection of a library.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from tritonclient import grpc as triton
from websockets.sync.client import connect

from service.frontend.scopes import HTTP_SCOPES
from tests import planted
from tests.serving import Server, eventually, serving

LISTING_SECONDS = 0.005
CHUNK = {"model": "sensors", "inputs": [[[1, 2, 3]] * 3], "session": "kept"}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which processes that start from now on append their use of the network."""
    file = tmp_path / "network"
    monkeypatch.setenv("NETWORK", str(file))
    planted.plant("recorded-network", monkeypatch)
    return file


def events(record: Path) -> list[str]:
    """Return the recorded uses of the network."""
    return [line for line in record.read_text().splitlines() if not line.startswith("process ")]


def watched_pids(record: Path) -> set[int]:
    return set(map(int, re.findall(r"^process (\d+)$", record.read_text(), re.MULTILINE)))


def pids(server: Server) -> set[int]:
    """Return the processes of a server."""
    own = psutil.Process(server.process.pid)
    return {own.pid, *(child.pid for child in own.children(recursive=True))}


def ports(server: Server) -> set[int]:
    return {int(address.rpartition(":")[2]) for address in (server.address, server.grpc)}


def foreign_sockets(processes: set[int], ports: set[int]) -> set[str]:
    """Return the sockets whose local port is not in `ports`: neither listeners of the service nor connections that it accepted."""
    foreign = set()
    for pid in processes:
        with suppress(psutil.NoSuchProcess):
            sockets = psutil.Process(pid).net_connections("inet")
            foreign |= {str(one) for one in sockets if not one.laddr or one.laddr.port not in ports}
    return foreign


@contextmanager
def listing_sockets(server: Server) -> Iterator[set[str]]:
    """List sockets until the end of the block. Yields the foreign sockets so far."""
    found: set[str] = set()
    ended = threading.Event()

    def list_sockets() -> None:
        while not ended.wait(LISTING_SECONDS):
            found.update(foreign_sockets(pids(server), ports(server)))

    thread = threading.Thread(target=list_sockets)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def use_every_endpoint(server: Server) -> None:
    client = server.client
    assert server.infer("words", ["how far is the sea ?"]).status_code == 200
    assert server.infer("sensors", [[[1, 2, 3]] * 1000] * 60).status_code == 200, "another process decodes it"
    assert client.post("/infer", json=CHUNK).status_code == 200
    state = client.get("/sessions/kept/state").content
    assert client.put("/sessions/brought/state", content=state).status_code == 200
    assert client.post("/sessions/kept/fork", json={"session": "copy"}).status_code == 200
    with connect(server.address.replace("http", "ws") + "/stream?model=sensors") as stream:
        stream.send('{"input": [[1, 2, 3]]}')
        assert "outputs" in str(stream.recv())
    with triton.InferenceServerClient(server.grpc) as calls:
        tensor = triton.InferInput("inputs", [3, 3], "FP32")
        tensor.set_data_from_numpy(np.ones((3, 3), np.float32))
        calls.infer("sensors", [tensor])
        assert calls.get_server_metadata().name
    for change in ("load", "unload", "load"):
        assert client.post(f"/v2/repository/models/words/{change}", json={}).status_code == 200
    assert client.post("/debug/trace?batches=1&seconds=0.1").status_code == 200
    for path in HTTP_SCOPES:
        for method in ("GET", "POST", "PUT", "DELETE"):
            if path != "/debug/trace":
                assert client.request(method, re.sub(r"\{[\w:]+\}", "other", path)).status_code in (200, 400, 404, 405, 501)


def test_service_opens_no_connections(models_folder: Path, tmp_path: Path, record: Path) -> None:
    with serving(models_folder, tmp_path, "--debug") as server, listing_sockets(server) as found:
        use_every_endpoint(server)
        eventually(lambda: pids(server) <= watched_pids(record))
        assert len(pids(server)) >= 4, "supervisor, frontend, its decoder and an engine"
    assert events(record) == []
    assert not found
