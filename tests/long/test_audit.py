"""The service opens no connections, and no name that a client sends makes it open a file outside of its models folder.

Audit hooks record what Python opens in all processes. A list of sockets shows the connections of libraries that are still open.
"""

from __future__ import annotations

import json
import re
import sys
from ast import literal_eval
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import grpc
import numpy as np
import psutil
import pytest
import uvloop
from tritonclient import grpc as triton
from websockets.sync.client import connect

from service.frontend.oip.protobuf import METHODS, SERVICE
from service.frontend.rest.scopes import HTTP_SCOPES
from tests import models, planted
from tests.long.fuzz.wire import send
from tests.serving import Server, eventually, serving

ROOT = Path(__file__).resolve().parents[2]
OPENING = ("open", "os.listdir", "os.scandir")
CHUNK = {"model": "sensors", "inputs": [[[1, 2, 3]] * 3], "session": "kept"}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which processes that start from now on append what they open."""
    file = tmp_path / "record"
    monkeypatch.setenv("RECORD", str(file))
    planted.plant("recorded", monkeypatch)
    return file


# Connections.


def pids(server: Server) -> set[int]:
    """Return the processes of a server."""
    own = psutil.Process(server.process.pid)
    return {own.pid, *(child.pid for child in own.children(recursive=True))}


def foreign_sockets(server: Server) -> list[str]:
    """Return the sockets that are neither listeners of the service nor accepted by it."""
    ports = {int(address.rpartition(":")[2]) for address in (server.address, server.grpc)}
    sockets = [one for pid in pids(server) for one in psutil.Process(pid).net_connections("inet")]
    return [str(one) for one in sockets if not one.laddr or one.laddr.port not in ports]


def use_every_endpoint(server: Server) -> None:
    client = server.client
    assert server.infer("words", ["how far is the sea ?"]).status_code == 200
    assert server.infer("sensors", [[[1, 2, 3]] * 1000] * 60).status_code == 200, "another process decodes it"
    assert client.post("/infer", json=CHUNK).status_code == 200
    state = client.get("/sessions/kept/state").content
    assert client.put("/sessions/brought/state", content=state).status_code == 200
    with connect(server.address.replace("http", "ws") + "/stream?model=sensors") as stream:
        stream.send('{"input": [[1, 2, 3]]}')
        assert "outputs" in str(stream.recv())
    with triton.InferenceServerClient(server.grpc) as calls:
        tensor = triton.InferInput("inputs", [3, 3], "FP32")
        calls.infer("sensors", [tensor.set_data_from_numpy(np.ones((3, 3), np.float32))])
    for change in ("load", "unload", "load"):
        assert client.post(f"/v2/repository/models/words/{change}", json={}).status_code == 200
    assert client.post("/debug/trace?batches=1&seconds=0.1").status_code == 200
    for path in HTTP_SCOPES:
        for method in ("GET", "POST", "PUT", "DELETE"):
            if path != "/debug/trace":
                assert client.request(method, re.sub(r"\{[\w:]+\}", "other", path)).status_code in (200, 400, 404, 405, 501)


def test_service_opens_no_connections(models_folder: Path, tmp_path: Path, record: Path) -> None:
    with serving(models_folder, tmp_path, "--debug") as server:
        use_every_endpoint(server)
        eventually(lambda: pids(server) <= set(map(int, re.findall(r"^process (\d+)$", record.read_text(), re.MULTILINE))))
        assert len(pids(server)) >= 4, "supervisor, frontend, its decoder and an engine"
        assert not foreign_sockets(server)
    assert [line for line in record.read_text().splitlines() if not line.startswith((*OPENING, "process"))] == []


# Files.

MARK = "zq"
"""Part of every name of a client that could be a file, so that a path made of the name is recognised."""
NAMES = (
    *(f"../{MARK}-outside", f"words/../../{MARK}-outside", f"words/1/{MARK}", f"{MARK}/", f"..{MARK}", f"/etc/{MARK}"),
    *("..", ".", "../..", "/etc/passwd", "../../../../etc/passwd", f"..\\{MARK}", f"{MARK}\0", f"words\0{MARK}", f" ..{MARK}"),
    *(f"\u2025/{MARK}", f"\uff0e\uff0e/{MARK}", f"%2e%2e%2f{MARK}", f"file:///{MARK}", f"~/{MARK}", f"{MARK}\n{MARK}"),
    *(MARK * 128, MARK * 500_000),
)
ALLOWED = ("__editable__", "/proc", "/sys", "/dev", "/usr", "/lib", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types")
"""Paths that the service may open besides its own code and Python's. The first is an entry of sys.path."""
TARGETS = (
    *("POST /v2/repository/models/{}/load", "POST /v2/repository/models/{}/unload", "GET /v2/models/{}", "GET /models/{}/card"),
    *("GET /v2/models/words/versions/{}/ready", "GET /sessions/{}/state", "GET /stream?model={}"),
)
CALLS = ("ModelMetadata", "ModelReady", "ModelConfig", "ModelInfer", "RepositoryModelLoad", "RepositoryModelUnload")


def requests(name: str) -> Iterator[bytes]:
    """Yield requests over HTTP that name a model, a version or a session."""
    path = quote(name.encode("utf-8", "surrogateescape"), safe="")[:60_000]
    lines = [
        (target.format(each), b"") for each in (path, path.replace("%2F", "/").replace("..", "%2e%2e")) for target in TARGETS
    ]
    known = {"model": "words", "inputs": ["how far"]}
    for field in ("model", "version", "session"):
        lines.append(("POST /infer", json.dumps(known | {field: name}).encode()))
    for line, body in lines:
        head = f"{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        yield head.encode() + body


def send_name(server: Server, name: str) -> None:
    for request in requests(name):
        received = uvloop.run(send(server.address, request))
        assert received.startswith((b"HTTP/1.1 3", b"HTTP/1.1 4")), (request[:200], received[:300])
    with grpc.insecure_channel(server.grpc) as channel:
        for method in CALLS:
            field = "name" if method in ("ModelMetadata", "ModelReady", "ModelConfig") else "model_name"
            with suppress(grpc.RpcError, UnicodeEncodeError):
                message = METHODS[method].request_type(**{field: name})
                channel.unary_unary(f"/{SERVICE}/{method}")(message.SerializeToString(), timeout=60)


def test_names_of_clients_open_nothing_outside_of_the_models_folder(tmp_path: Path, record: Path) -> None:
    folder = tmp_path / "models"
    models.words(folder)
    models.words(tmp_path, f"{MARK}-outside")
    with serving(folder, tmp_path) as server:
        send_name(server, MARK)  # the first requests of each kind may load code
        assert server.client.post("/v2/repository/models/words/load", json={}).status_code == 200
        assert str(folder / "words" / "1" / "model.toml") in record.read_text(), "the record has what is opened"
        since = record.stat().st_size
        for name in NAMES:
            send_name(server, name)
        lines = [line.partition(" ") for line in record.read_text()[since:].splitlines()]
        assert server.infer("words", ["how far"]).status_code == 200
    own = (str(folder), str(ROOT), sys.prefix, sys.base_prefix, *ALLOWED)
    opened = [str(literal_eval(text)) for event, _, text in lines if event in OPENING and text.startswith("'")]
    assert [path for path in opened if not path.startswith(own) or ".." in Path(path).parts or MARK in path] == []
