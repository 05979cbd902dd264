"""512 streams of one batch, and 64 of them read slowly or not at all. `make test-all` runs it.

The times are steps of a planted device, see disconnects.py: a reply must arrive before the next step may end. Only the limit after which
the service closes a client that has stopped reading is a time.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from tests.long.disconnects import Service, gated, settle
from tests.planted import constants
from tests.raw_websocket import BINARY, TEXT, frame, handshake
from tests.serving import LIMIT_SECONDS, eventually
from tests.steady import resident_bytes

ROUNDS, SLOW_STEPS = 12, 4
LONG, SHORT = 500, 1
"""Time steps of a chunk. A reply to a long chunk has some 14 KB."""
SMALL_BUFFER = 4096
MOST_BYTES = 1 << 20
"""Bytes of a frontend for each slow reader."""
SEND_SECONDS = 30
READ_SECONDS = 1.0
AT_ONCE = 64
BATCHES = {"max_batch_sequences": "512", "max_batch_tokens": "65536", "batch_budget_ms": "60000", "state_slots": "1024"}
"""Batches with room for a chunk of each stream."""


class Mix(NamedTuple):
    """Numbers of streams that read each reply, read a reply now and then, read one in READ_SECONDS behind full buffers, or read nothing."""

    usual: int
    slow: int
    behind: int
    stopped: int


MANY = Mix(448, 32, 8, 24)


class Stream:
    """A session on a WebSocket. It reads nothing ahead of the reply that a test takes."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        self.sent = self.read = 0
        """Time steps of the chunks, and of the session after the last reply."""

    async def open(self, address: str) -> None:
        loop, url = asyncio.get_running_loop(), urlsplit(address)
        await loop.sock_connect(self._socket, (str(url.hostname), int(url.port or 0)))
        await loop.sock_sendall(self._socket, handshake("model=accumulator&return=sequence"))
        reply = b""
        while not reply.endswith(b"\r\n\r\n"):
            reply += await self._receive(1)
        assert reply.startswith(b"HTTP/1.1 101 "), reply

    async def send(self, steps: int) -> None:
        values = np.ones(steps, np.int32).tobytes()
        await asyncio.get_running_loop().sock_sendall(self._socket, frame(BINARY, values))
        self.sent += steps

    async def send_ahead(self) -> None:
        """Send long chunks while the service takes them."""
        while True:
            await self.send(LONG)

    async def reply(self) -> None:
        """Read the next reply."""
        opcode, payload = -1, b""
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while opcode != TEXT:  # pings
                    opcode, payload = await self._frame()
        except TimeoutError:
            raise AssertionError("a reply does not arrive") from None
        reply = json.loads(payload)
        assert "session" in reply, reply
        self.read = reply["session"]["steps"]

    async def closed(self) -> bool:
        """Read the remaining replies, and return whether the connection then ends."""
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while await self._receive(1 << 16, whole=False):
                    pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def leave(self) -> None:
        self._socket.close()

    async def _frame(self) -> tuple[int, bytes]:
        opcode, size = await self._receive(2)
        if size >= 126:
            size = int.from_bytes(await self._receive(2 if size == 126 else 8))
        return opcode & 15, await self._receive(size)

    async def _receive(self, size: int, *, whole: bool = True) -> bytes:
        data = b""
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._socket, size - len(data))
            if not whole:
                return part
            if not part:
                raise ConnectionError("the service closed a stream")
            data += part
        return data


async def all_of(streams: Iterable[Stream], work: Callable[[Stream], object]) -> None:
    """Do the same with each stream, with some at once."""
    waiting = iter(streams)

    async def some() -> None:
        for stream in waiting:
            await work(stream)  # type: ignore[misc]

    async with asyncio.timeout(10 * LIMIT_SECONDS), asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())


@asynccontextmanager
async def opened(service: Service, *counts: int) -> AsyncIterator[list[list[Stream]]]:
    """Yield open streams of several kinds. They leave at the end."""
    kinds = [[Stream() for _ in range(count)] for count in counts]
    streams = [stream for kind in kinds for stream in kind]
    try:
        await all_of(streams, lambda stream: stream.open(service.server.address))
        yield kinds
    finally:
        for stream in streams:
            stream.leave()


@asynccontextmanager
async def sending_ahead(streams: list[Stream], service: Service) -> AsyncIterator[None]:
    """Fill all buffers between the service and the streams, with an open gate, and keep them full."""
    senders = [asyncio.ensure_future(stream.send_ahead()) for stream in streams]
    try:
        before, now = None, await asyncio.to_thread(progress, service, streams)
        while before != now or now[1] or not all(stream.sent for stream in streams):
            await asyncio.sleep(1)
            before, now = now, await asyncio.to_thread(progress, service, streams)
        yield
    finally:
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)  # some have lost their connection


def progress(service: Service, streams: list[Stream]) -> tuple[int, int, int]:
    """Return the number of batches, of requests in flight, and of steps that the streams have sent."""
    figures = service.figures()
    return figures["batches_total"], figures["requests_in_flight"], sum(stream.sent for stream in streams)


async def steps_of_replies(service: Service, usual: list[Stream], slow: list[Stream]) -> list[int]:
    """Let usual and slow streams send a chunk in each of ROUNDS rounds. Return after how many steps all usual streams had their replies.

    The chunk of the first stream is in flight while the others arrive, which therefore share the next batch.
    """
    first, *others = usual
    steps = []
    for number in range(1, ROUNDS + 1):
        service.gate.open()
        await asyncio.to_thread(settle, "requests and queue", service.holds, (0, 0))
        service.gate.let(0)
        before, scheduled = await asyncio.to_thread(service.batches), await asyncio.to_thread(sequences_scheduled, service)
        await first.send(SHORT)
        await asyncio.to_thread(settle, "scheduled", lambda: sequences_scheduled(service), scheduled + 1)
        await all_of(others, lambda stream: stream.send(SHORT))
        await all_of(slow, lambda stream: stream.send(LONG))
        held = len(usual) + len(slow)
        await asyncio.to_thread(settle, "requests and queue", service.holds, (held, held - 1))
        service.gate.let(1)
        await first.reply()
        service.gate.let(1)
        await all_of(others, Stream.reply)
        steps.append(await asyncio.to_thread(service.batches) - before)
        if number % SLOW_STEPS == 0:
            await all_of(slow, Stream.reply)
    assert all(stream.read == stream.sent for stream in usual)
    return steps


def sequences_scheduled(service: Service) -> int:
    """Return how many chunks have left the queue for a batch."""
    return int(service.server.metric("seqserve_stage_seconds_count", stage="queue"))


async def compare(service: Service, mix: Mix) -> str:
    """Check the steps and the memory without and with slow readers. Returns them."""
    pid = service.server.pid("frontend-0")
    async with opened(service, mix.usual) as [usual]:
        alone = await steps_of_replies(service, usual, [])
        service.gate.open()
        before = resident_bytes(pid)
        async with opened(service, mix.slow, mix.behind + mix.stopped) as [slow, stopped]:
            async with sending_ahead(stopped, service):
                held = (resident_bytes(pid) - before) / len(stopped)
                beside = await steps_of_replies(service, usual, slow)
                held_at_end = (resident_bytes(pid) - before) / len(slow + stopped)
                assert alone == beside == [2] * ROUNDS
                assert max(held, held_at_end) < MOST_BYTES
                assert service.server.metric("seqserve_connections_closed_total") == 0
            service.gate.open()
    return f"steps {alone} and {beside}, {held / 1024:.0f} and then {held_at_end / 1024:.0f} KiB for each slow reader"


def test_slow_readers_delay_no_step_of_other_streams(tmp_path: Path, show: Callable[[object], None]) -> None:
    with gated(tmp_path, **BATCHES) as service:
        show(asyncio.run(compare(service, MANY)))
        eventually(lambda: not service.held())
        assert not service.server.events("bug") + service.server.events("library warning")


async def read_slowly(streams: list[Stream], *, sends: bool) -> None:
    """Read a reply of each stream, again and again."""
    while True:
        await asyncio.sleep(READ_SECONDS)
        for stream in streams:
            if sends:
                await stream.send(LONG)
            await stream.reply()


async def close_stopped(service: Service, mix: Mix) -> None:
    """Check that only streams that have stopped reading are closed, and that their sessions and state slots are free."""
    service.gate.open()
    async with opened(service, *mix) as [usual, slow, behind, stopped], sending_ahead(behind + stopped, service):
        await ask(usual)
        readers = [asyncio.ensure_future(read_slowly(streams, sends=streams is slow)) for streams in (slow, behind)]
        try:
            await asyncio.to_thread(settle, "closed streams", lambda: closed(service), mix.stopped)
            remaining = len(usual + slow + behind)
            await asyncio.to_thread(settle, "sessions and state slots", lambda: held_states(service), (remaining, remaining))
            assert [await stream.closed() for stream in stopped] == [True] * mix.stopped
            await ask(usual)
            assert closed(service) == mix.stopped == service.server.metric("seqserve_connections_closed_total")
            assert not any(reader.done() for reader in readers), "a stream that reads slowly was closed"
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def ask(streams: list[Stream]) -> None:
    """Send a chunk on each stream, and read its reply."""
    await all_of(streams, lambda stream: stream.send(SHORT))
    await all_of(streams, Stream.reply)


def held_states(service: Service) -> tuple[int, int]:
    figures = service.figures()
    return figures["sessions"], figures["state_slots_used"]


def closed(service: Service) -> int:
    return int(service.server.metric("seqserve_connections_closed_total", reason="slow_reader"))


def test_readers_that_have_stopped_are_closed_and_no_others(tmp_path: Path) -> None:
    with constants({"service.frontend.connection_guard.SEND_SECONDS": SEND_SECONDS}), gated(tmp_path, **BATCHES) as service:
        asyncio.run(close_stopped(service, MANY))
        eventually(lambda: not service.held())
        assert not service.server.events("bug") + service.server.events("library warning")
