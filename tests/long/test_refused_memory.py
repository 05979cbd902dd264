"""Requests that are refused for their size or their shape leave no memory behind: in the frontend, its decoder and the other processes.

Memory is compared between the ends of equal batches of requests. An allocator grows in steps, a leak in each batch: the batch with the
least growth counts.
"""

from __future__ import annotations

import asyncio
import gzip
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice, pairwise
from pathlib import Path

import pytest
import uvloop

from loadtest.oip_requests import PATH
from tests.frontend.http2 import peer
from tests.long.fuzz.wire import grpc
from tests.long.fuzz.wire.conversation import never
from tests.long.fuzz.wire.line import send
from tests.serving import Server, serving
from tests.steady import processes, resident_bytes

MANY, DEEP = 100_000, 1_000_000
SHAPED_REQUESTS, SHAPED_BYTES = 100, 1 << 20
"""Requests of one batch with many parts, and the bytes that they may add to the memory of all processes."""
LARGE_REQUESTS, LARGE_BYTES = 10_000, 4 << 20
"""The same of requests that are too large."""
BATCHES = 4
MAX_BODY_BYTES = 1 << 16
CALLERS = 4
Answered = Callable[[bytes], bool]


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", "")).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    return head(path, f"Content-Length: {len(body)}", *headers) + body


def oip(inputs: str = "", outputs: str = "", parameters: str = "") -> bytes:
    body = f'{{"inputs": [{inputs}], "outputs": [{outputs}], "parameters": {{{parameters}}}}}'
    return post("/v2/models/words/infer", body.encode())


SHAPED = {
    "deep arrays": post("/infer", b'{"model": "words", "inputs": ' + b"[" * DEEP),
    "deep objects": post("/v2/models/words/infer", b'{"a":' * DEEP),
    "inputs": post("/infer", b'{"model": "words", "inputs": [' + b'"a",' * MANY + b'"a"]}'),
    "tensors": oip(inputs=",".join(['{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}'] * MANY)),
    "outputs": oip(outputs=",".join(['{"name": "scores"}'] * MANY)),
    "parameters": oip(parameters=",".join(f'"p{number}": 1' for number in range(MANY))),
    "chunks": head("/infer", "Transfer-Encoding: chunked") + b"1\r\n[\r\n" * MANY + b"0\r\n\r\n",
}
"""Requests with many parts."""


def bomb(size: int) -> bytes:
    return gzip.compress(b" " * size, 9)


def chunked(size: int) -> bytes:
    return head("/infer", "Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (size, b" " * size)


def call(message: bytes, *, compressed: bool = False, told: int | None = None) -> bytes:
    """Return a connection with one call. told: the size of the message in its prefix."""
    fields = [(b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"grpc-encoding", b"gzip")]
    block = peer.block(*fields[: 2 + compressed], path=PATH.encode())
    data = struct.pack(">BI", compressed, len(message) if told is None else told) + message
    frames = [data[start : start + 16_000] for start in range(0, len(data), 16_000)]
    sent = [peer.frame(peer.DATA, 0, grpc.LAST_STREAM, part) for part in frames[:-1]]
    sent.append(peer.frame(peer.DATA, peer.END_STREAM, grpc.LAST_STREAM, frames[-1]))
    return b"".join((peer.PREFACE, peer.settings(), peer.frame(peer.HEADERS, peer.END_HEADERS, grpc.LAST_STREAM, block), *sent))


INFER, GZIP = "/v2/models/words/infer", "Content-Encoding: gzip"
LARGE = {
    "declared": head("/infer", f"Content-Length: {2**63 - 1}"),
    "one byte more": post("/infer", b" " * (MAX_BODY_BYTES + 1)),
    "chunked": chunked(MAX_BODY_BYTES + 1),
    "gzip": post(INFER, bomb(MAX_BODY_BYTES + 1), GZIP),
    "gzip bomb": post(INFER, bomb(60 << 20), GZIP),
    "deflate bomb": post(INFER, zlib.compress(b" " * (60 << 20), 9), "Content-Encoding: deflate"),
    "gzip in gzip": post(INFER, gzip.compress(bomb(60 << 20)), GZIP),
}
LARGE_CALLS = {
    "message": call(bytes(MAX_BODY_BYTES + 1)),
    "declared message": call(bytes(100), told=2**32 - 1),
    "compressed message": call(bomb(60 << 20), compressed=True),
}
"""Requests that are larger than MAX_BODY_BYTES, or are so once they are decompressed."""
OTHER_STATUS = {"gzip in gzip": 400}
"""The body that is decompressed once is small, and not JSON."""


@contextmanager
def small_bodies(folder: Path, scratch: Path) -> Iterator[Server]:
    with serving(folder, scratch, max_body_bytes=str(MAX_BODY_BYTES)) as server:
        yield server


def status_of(received: bytes) -> int:
    """Return the status of the only reply of HTTP/1.1."""
    assert received.startswith(b"HTTP/1.1 ") and received.count(b"HTTP/1.1 ") == 1, received[:200]
    return int(received[9:12])


async def _send_all(server: Server, requests: Sequence[tuple[str, bytes, Answered]]) -> None:
    waiting = iter(requests)

    async def work() -> None:
        for address, data, answered in waiting:
            await send(address, data, answered)

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(work())


def held_bytes(server: Server) -> int:
    """Return the resident bytes of all processes of a server, including processes that frontends have started."""
    pids = list(processes(server).values())
    children = [int(child) for pid in pids for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return sum(map(resident_bytes, {*pids, *children}))


def growth(server: Server, requests: Sequence[tuple[str, bytes, Answered]]) -> int:
    """Return the least growth of a batch, after a batch that fills the memory pools."""
    held = []
    for _ in range(1 + BATCHES):
        uvloop.run(_send_all(server, requests))
        held.append(held_bytes(server))
    return min(after - before for before, after in pairwise(held[1:]))


def shaped(server: Server, kind: str) -> list[tuple[str, bytes, Answered]]:
    return [(server.address, SHAPED[kind], never)] * SHAPED_REQUESTS


def large(server: Server, count: int) -> list[tuple[str, bytes, Answered]]:
    calls = [(f"//{server.grpc}", data, grpc.is_answered) for data in LARGE_CALLS.values()]
    return list(islice(cycle([*((server.address, data, never) for data in LARGE.values()), *calls]), count))


@pytest.fixture(scope="module")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(scope="module")
def small(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with small_bodies(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.mark.parametrize("kind", SHAPED)
def test_requests_with_many_parts_leave_no_memory(server: Server, kind: str) -> None:
    assert status_of(uvloop.run(send(server.address, SHAPED[kind], never))) in (400, 413)
    assert growth(server, shaped(server, kind)) <= SHAPED_BYTES


@pytest.mark.parametrize("kind", LARGE)
def test_requests_beyond_the_limit_are_refused(small: Server, kind: str) -> None:
    assert status_of(uvloop.run(send(small.address, LARGE[kind], never))) == OTHER_STATUS.get(kind, 413)


def test_requests_at_the_limit_are_read(small: Server) -> None:
    """Blanks are not JSON, which the service notices only when it reads the body."""
    for data in (
        post("/infer", b" " * MAX_BODY_BYTES),
        chunked(MAX_BODY_BYTES),
        post(INFER, bomb(MAX_BODY_BYTES), GZIP),
    ):
        assert status_of(uvloop.run(send(small.address, data, never))) == 400


@pytest.mark.parametrize("kind", LARGE_CALLS)
def test_calls_beyond_the_limit_are_refused(small: Server, kind: str) -> None:
    received = uvloop.run(send(f"//{small.grpc}", LARGE_CALLS[kind], grpc.is_answered))
    assert grpc.judge(received.replace(struct.pack(">I", grpc.LAST_STREAM), struct.pack(">I", 1))).replies["grpc 8"] == 1


def test_ten_thousand_requests_beyond_the_limit_leave_no_memory(small: Server) -> None:
    before = small.metric("seqserve_requests_accepted_total")
    assert growth(small, large(small, LARGE_REQUESTS // BATCHES)) * BATCHES <= LARGE_BYTES
    assert small.metric("seqserve_requests_accepted_total") > before
