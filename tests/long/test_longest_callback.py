"""No bytes from a client keep the event loop of a frontend busy: the longest callback under each attack, in CPU time of its thread.

CPU time does not grow on a busy machine. A flood of frames takes 35 to 250 ms if each read is parsed at once. The server's frontends run
on asyncio's event loop, because uvloop's callbacks cannot be timed.
"""

from __future__ import annotations

import gzip
import json
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.long.callbacks import MAX_CALLBACK_SECONDS
from tests.planted import plant
from tests.raw_websocket import BINARY, CONTINUATION, PING, PONG, QUERY, TEXT, connection, frame, open_socket
from tests.serving import Server, serving

ATTACK_SECONDS = 2.0
"""How long an attack lasts that the server does not end."""
PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Attack:
    """Bytes that a client sends. stream: the client opens a WebSocket with this query first. reads: whether it reads the replies."""

    name: str
    data: bytes
    stream: str | None = None
    reads: bool = True


def post(path: str, body: bytes, headers: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


HEAD = b"POST /infer HTTP/1.1\r\nHost: localhost\r\n"
SMALL = post("/infer", json.dumps({"model": "words", "inputs": ["how far"]}).encode())
ROW = json.dumps({"input": [[0.1, -2.0, 30.0]]}).encode()

ATTACKS = (
    Attack("empty messages", frame(BINARY) * 300_000, stream=QUERY),
    Attack("empty fragments", frame(TEXT, last=False) + frame(CONTINUATION, last=False) * 300_000, stream=QUERY),
    Attack(
        "messages of many fragments", (frame(BINARY, last=False) + frame(CONTINUATION, last=False) * 999) * 300, stream=QUERY
    ),
    Attack("pings", frame(PING, b"x") * 300_000, stream=QUERY),
    Attack("pings without reading the pongs", frame(PING, b"x" * 125) * 100_000, stream=QUERY, reads=False),
    Attack("pongs", frame(PONG) * 300_000, stream=QUERY),
    Attack("small messages without reading the replies", frame(TEXT, ROW) * 50_000, stream=QUERY, reads=False),
    # Without the vectors of every step: asyncio's transport copies an answer of 200 MB at once, and uvloop's does not.
    Attack("large binary messages", frame(BINARY, bytes(1_020_000)) * 8, stream="model=sensors"),
    Attack("text that is not UTF-8", frame(TEXT, b"\xff" * 1_000_000) * 8, stream=QUERY),
    Attack("header without end", HEAD + b"X: " + b"x" * (8 << 20)),
    Attack("many headers", HEAD + b"X: 1\r\n" * 200_000 + b"\r\n"),
    Attack("pipelined requests", SMALL * 20_000),
    Attack("pipelined requests without reading the replies", SMALL * 20_000, reads=False),
    Attack("pipelined requests of the general path", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100_000),
    Attack("chunks of one byte", HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 500_000),
    Attack("many names to return", post("/infer", b'{"model":"words","inputs":["a"],"return":[' + b'"x",' * 15_000 + b'"x"]}')),
    Attack(
        "a million names to return", post("/infer", b'{"model":"words","inputs":["a"],"return":[' + b"1," * 1_000_000 + b"1]}")
    ),
    Attack("large JSON", post("/infer", b'{"model":"words","inputs":[[' + b"1," * 7_000_000 + b"1]]}")),
    Attack(
        "a million outputs in gzip",
        post(
            "/v2/models/words/infer",
            gzip.compress(b'{"inputs":[],"outputs":[' + b'{"name":""},' * 1_000_000 + b'{"name":""}]}'),
            "Content-Encoding: gzip\r\n",
        ),
    ),
    Attack(
        "large answers",
        post("/infer", json.dumps({"model": "words", "inputs": [[1] * 60] * 60, "return": ["sequence"]}).encode()) * 50,
    ),
)


@pytest.fixture(scope="module")
def callbacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the callbacks that took long."""
    return tmp_path_factory.mktemp("callbacks") / "long"


@pytest.fixture(scope="module")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory, callbacks: Path) -> Iterator[Server]:
    callbacks.touch()
    with pytest.MonkeyPatch.context() as patch:
        plant("timed-callbacks", patch)
        patch.setenv("CALLBACKS", str(callbacks))
        with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
            # The first requests of a frontend take longer.
            for _ in range(3):
                running.infer("words", ["how far"])
                run(running, Attack("one message", frame(TEXT, ROW), stream=QUERY))
            yield running


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_attack_does_not_keep_the_event_loop_busy(server: Server, callbacks: Path, attack: Attack) -> None:
    before = callbacks.stat().st_size
    run(server, attack)
    assert server.client.get("/healthz").status_code == 200
    long = sorted(callbacks.read_text()[before:].splitlines(), reverse=True)
    assert not long or float(long[0].split()[0]) < MAX_CALLBACK_SECONDS, long[:5]


def run(server: Server, attack: Attack) -> None:
    """Send the bytes until all are sent and no reply arrives, the server closes the connection, or the time is over."""
    with connection(server) if attack.stream is None else open_socket(server, attack.stream) as client:
        client.setblocking(False)
        waiting, end = memoryview(attack.data), time.monotonic() + ATTACK_SECONDS
        while time.monotonic() < end:
            readable, writable, _ = select.select([client] * attack.reads, [client] if waiting else [], [], 0.3)
            try:
                if readable and not client.recv(PART_BYTES):
                    return
                if writable:
                    waiting = waiting[client.send(waiting[:PART_BYTES]) :]
            except ConnectionError:
                return
            if not (readable or writable or waiting):
                return
