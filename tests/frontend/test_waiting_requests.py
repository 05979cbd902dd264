"""Requests that wait for a later tick of the event loop, which the test lets start. tests/long/test_waiting_requests.py has a service."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from loadtest.oip_requests import PATH
from service.errors import Overloaded
from service.frontend import start_queue
from service.frontend.decoder.turns import Turns
from service.frontend.http_protocol import HttpProtocol
from service.frontend.inference import Frontend
from service.frontend.start_queue import LongWaits, StartQueue
from service.metrics import CUT_OFF, GONE
from tests.frontend.http2.peer import reset
from tests.frontend.test_freed_connections import BODY, GREETING, Ports, call, hot, infer, limited, with_ports
from tests.raw_websocket import TEXT, frame, handshake

FRAME_HEAD_BYTES = 7
"""Of a small frame, and the first byte of its content."""


class HeldStarts(StartQueue):
    """Every request waits until `release`."""

    def must_wait(self, now: float) -> bool:
        return True

    def _schedule(self) -> None:
        """Schedule nothing."""

    @property
    def held(self) -> int:
        return len(self._waiting)

    def release(self) -> None:
        while self._waiting:
            self._next_tick()


def held_starts(frontend: Frontend) -> HeldStarts:
    assert isinstance(frontend.starts, HeldStarts)
    return frontend.starts


async def until(condition: Callable[[], object]) -> None:
    async with limited("the state is not reached"):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def connected(
    make_protocol: Callable[[], asyncio.Protocol],
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = await asyncio.get_running_loop().create_server(make_protocol, "127.0.0.1")
    try:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield reader, writer
    finally:
        writer.transport.abort()
        server.close()
        await server.wait_closed()


def test_grpc_requests_that_end_before_their_turn_are_counted(tmp_path: Path) -> None:
    async def test(frontend: Frontend, ports: Ports) -> None:
        starts, application = held_starts(frontend), ports.application
        async with connected(ports.grpc) as (_, writer):
            writer.write(GREETING + call(PATH, infer(3)))
            await until(lambda: starts.held == 1)
            writer.write(reset(1))
            await until(lambda: not application.open_calls)
            starts.release()
            writer.write(call(PATH, infer(3), stream=3))
            await until(lambda: starts.held == 1)
            application.cut_off()
            starts.release()
        assert application.held_bytes == 0
        frontend.metrics.snapshot()
        outcomes = {outcome: count for (_, _, outcome), [count] in frontend.metrics.requests.values.items() if count}
        assert outcomes == {GONE: 1, CUT_OFF: 1}

    with_ports(tmp_path, test, HeldStarts)


def test_pipelined_requests_that_wait_count_as_one_request(tmp_path: Path) -> None:
    """Their bytes are many, and each request is small."""

    async def test(frontend: Frontend, ports: Ports) -> None:
        async with connected(ports.http) as (_, writer):
            writer.write(hot(BODY) * 500)
            await until(lambda: held_starts(frontend).held == 1)
            assert frontend.bodies.held_bytes == len(hot(BODY))
        await until(lambda: frontend.bodies.held_bytes == 0)

    with_ports(tmp_path, test, HeldStarts)


def test_waiting_request_keeps_its_connection_open(tmp_path: Path) -> None:
    """The timer of an idle connection, which the application of the general path sets, ends when a request arrives."""

    async def test(frontend: Frontend, ports: Ports) -> None:
        protocols: list[HttpProtocol] = []

        def make() -> asyncio.Protocol:
            protocols.append(cast(HttpProtocol, ports.http()))
            return protocols[0]

        async with connected(make) as (reader, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: protocols[0].timeout_keep_alive_task is not None)
            writer.write(hot(BODY))
            await until(lambda: held_starts(frontend).held == 1)
            assert protocols[0].timeout_keep_alive_task is None

    with_ports(tmp_path, test, HeldStarts)


def test_slow_websocket_client_gains_no_time_from_a_busy_frontend(tmp_path: Path) -> None:
    async def test(frontend: Frontend, ports: Ports) -> None:
        message = frame(TEXT, b'{"input": [1, 2, 3]}')
        async with connected(ports.http) as (reader, writer):
            writer.write(handshake("model=words"))
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: [socket for socket in ports.sockets if socket._receiver is not None])
            [socket] = ports.sockets
            held_starts(frontend).release()
            began = []
            for byte in message[:-1]:
                writer.write(bytes([byte]))
                await until(lambda: held_starts(frontend).held == 1)
                held_starts(frontend).release()
                began.append(socket.phase_began)
            assert len(set(began[FRAME_HEAD_BYTES:])) == 1

    with_ports(tmp_path, test, HeldStarts)


@pytest.mark.usefixtures("without_collections")
def test_refused_body_at_the_decoder_is_freed_without_a_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_queue, "PATIENCE_SECONDS", 0.0)
    bodies: list[weakref.ref[Any]] = []

    class Body:
        pass

    async def wait(turns: Turns) -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        await turns.take()

    async def refuse() -> list[Any]:
        turns = Turns(LongWaits(0.0))
        waiting = [asyncio.ensure_future(wait(turns)) for _ in range(4)]
        await asyncio.sleep(0.01)
        for _ in waiting:
            turns.end()
            await asyncio.sleep(0.001)
        return [type(task.exception()) for task in waiting]

    kinds = asyncio.run(refuse())
    assert Overloaded in kinds and [body() for body in bodies] == [None] * 4
