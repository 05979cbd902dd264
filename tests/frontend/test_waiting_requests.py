"""Requests that wait for a later tick of the event loop, which the test lets start. tests/long/test_waiting_requests.py has a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.oip_requests import PATH
from service.frontend.http_protocol import HttpProtocol
from service.frontend.start_queue import StartQueue
from service.metrics import CUT_OFF, GONE
from tests.frontend.http2.peer import reset
from tests.frontend.ports import BODY, Ports, connected, hot, until, watched, with_ports
from tests.frontend.test_freed_connections import GREETING, call, infer
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


def starts_of(ports: Ports) -> HeldStarts:
    assert isinstance(ports.frontend.starts, HeldStarts)
    return ports.frontend.starts


def test_grpc_requests_that_end_before_their_turn_are_counted(tmp_path: Path) -> None:
    async def test(ports: Ports) -> None:
        starts, application, metrics = starts_of(ports), ports.application, ports.frontend.metrics
        async with connected(ports.grpc) as (_, writer):
            writer.write(GREETING + call(PATH, infer()))
            await until(lambda: starts.held == 1)
            writer.write(reset(1))
            await until(lambda: not application.open_calls)
            starts.release()
            writer.write(call(PATH, infer(), stream=3))
            await until(lambda: starts.held == 1)
            application.cut_off()
            starts.release()
        assert application.held_bytes == 0
        metrics.snapshot()
        assert {labels[2]: count for labels, [count] in metrics.requests.values.items() if count} == {GONE: 1, CUT_OFF: 1}

    with_ports(tmp_path, test, HeldStarts)


def test_waiting_requests_count_as_one_and_keep_their_connection_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of pipelined requests are many, and each is small. A timer of the general path closes only an idle connection."""
    protocols = watched((HttpProtocol,), monkeypatch)

    async def test(ports: Ports) -> None:
        bodies = ports.frontend.bodies

        def idle_timer() -> object:
            protocol: Any = protocols[0]()
            return protocol.timeout_keep_alive_task

        async with connected(ports.http) as (reader, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await until(idle_timer)
            writer.write(hot(BODY) * 500)
            await until(lambda: starts_of(ports).held == 1)
            assert bodies.held_bytes == len(hot(BODY))
            assert idle_timer() is None
        await until(lambda: bodies.held_bytes == 0)

    with_ports(tmp_path, test, HeldStarts)


def test_slow_websocket_client_gains_no_time_from_a_busy_frontend(tmp_path: Path) -> None:
    async def test(ports: Ports) -> None:
        starts, message = starts_of(ports), frame(TEXT, b'{"input": [1, 2, 3]}')
        async with connected(ports.http) as (reader, writer):
            writer.write(handshake("model=words"))
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: [socket for socket in ports.sockets if socket._receiver is not None])
            [socket] = ports.sockets
            starts.release()
            began = []
            for byte in message[:-1]:
                writer.write(bytes([byte]))
                await until(lambda: starts.held == 1)
                starts.release()
                began.append(socket.phase_began)
            assert len(set(began[FRAME_HEAD_BYTES:])) == 1

    with_ports(tmp_path, test, HeldStarts)
