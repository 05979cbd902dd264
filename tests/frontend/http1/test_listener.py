"""A listener takes its share of the connections, and the rest of other listeners. A frontend survives errors of its periodic work."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from contextlib import ExitStack, closing
from unittest.mock import Mock

import pytest

from service.frontend.guards.connection_share import ConnectionShare
from service.frontend.http1 import listener
from service.frontend.http1.listener import Listener, SharedPort
from service.frontend.run.frontend import Frontend
from service.ipc.connection_counts import NOT_ACCEPTING, ConnectionCounts, Port
from tests.frontend.in_process import InProcess
from tests.serving import LIMIT_SECONDS, eventually


def share(numbers: list[int], place: int = 0) -> ConnectionShare:
    counts = ConnectionCounts.create(len(numbers)).on_port(Port.HTTP)
    for other, number in enumerate(numbers):
        counts[other] = number
    return ConnectionShare(counts, place)


@pytest.mark.parametrize(
    "numbers, excess, allowance",
    [
        ([0], 0, math.inf),
        ([9], 0, math.inf),
        ([9, NOT_ACCEPTING], 0, math.inf),
        ([0, 0, 0, 0], 0, 1),
        ([1, 0, 0, 0], 1, 1),
        ([1, 1, 1, 1], 0, 1),
        ([4, 4, 4, 4], 0, 2),
        ([100, 20, 30, 50], 50, 13),
        ([0, 20, 30, 50], 0, 32),
        ([20, 20, NOT_ACCEPTING, NOT_ACCEPTING], 0, 6),
    ],
)
def test_share_follows_from_the_mean(numbers: list[int], excess: int, allowance: float) -> None:
    assert share(numbers).excess() == excess
    assert int(min(share(numbers).allowance(), 1e9)) == min(allowance, 1e9)


class Listening:
    """A listener in this process, which counts accepted connections. It starts with `connections`, which is only a number."""

    def __init__(self, listening: socket.socket, numbers: memoryview[int], place: int, connections: int = 0) -> None:
        self.accepted = 0
        port = SharedPort(listening.dup(), ConnectionShare(numbers, place))
        self._listening = port.listening
        self._listener = Listener(port, self._make_protocol, lambda _: True, lambda: connections + self.accepted)
        self._listener.open()

    def close(self) -> None:
        self._listener.close()
        self._listening.close()

    def _make_protocol(self) -> asyncio.Protocol:
        self.accepted += 1
        return asyncio.Protocol()


async def connect(listening: socket.socket, frontends: list[Listening], count: int) -> list[int]:
    """Connect clients one after the other. Return how many connections each frontend has accepted."""
    with ExitStack() as stack:
        for number in range(1, count + 1):
            stack.enter_context(closing(socket.create_connection(listening.getsockname())))
            async with asyncio.timeout(LIMIT_SECONDS):
                while sum(frontend.accepted for frontend in frontends) < number:
                    await asyncio.sleep(0.001)
    for frontend in frontends:
        frontend.close()
    return [frontend.accepted for frontend in frontends]


@pytest.mark.parametrize("beside", [[], [0], [0] * 15, [NOT_ACCEPTING] * 3, [100, 100]])
def test_connections_that_others_leave_are_accepted(beside: list[int]) -> None:
    numbers = ConnectionCounts.create(1 + len(beside)).on_port(Port.HTTP)
    for place, number in enumerate(beside, 1):
        numbers[place] = number

    async def test() -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            return await connect(listening, [Listening(listening, numbers, 0)], 20)

    assert asyncio.run(test()) == [20] and numbers[0] == NOT_ACCEPTING


def test_frontend_above_the_mean_leaves_connections_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_EXCESS", math.inf)  # a pause of minutes, whatever the load of the machine
    numbers = ConnectionCounts.create(2).on_port(Port.HTTP)

    async def test() -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            many, few = Listening(listening, numbers, 0, connections=10**6), Listening(listening, numbers, 1)
            return await connect(listening, [many, few], 10)

    assert asyncio.run(test()) == [0, 10]


def test_long_handshake_ends_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its place otherwise."""
    monkeypatch.setattr(listener, "FULL_HANDSHAKE_SECONDS", 0.01)
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 2 * LIMIT_SECONDS)
    numbers, tls = ConnectionCounts.create(1).on_port(Port.HTTP), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    async def test() -> bytes:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
            port = SharedPort(listening.dup(), ConnectionShare(numbers, 0))
            accepting = Listener(port, asyncio.Protocol, lambda connecting: connecting == 0, lambda: 0, lambda: tls)
            accepting.open()
            silent, _ = (stack.enter_context(socket.create_connection(listening.getsockname())) for _ in range(2))
            silent.setblocking(False)
            async with asyncio.timeout(LIMIT_SECONDS):
                received = await loop.sock_recv(silent, 1)
                accepting.close()
                stack.close()
                while accepting._connecting:
                    await asyncio.sleep(0.001)
            return received

    assert asyncio.run(test()) == b""


@pytest.mark.parametrize("part", ["policy", "tls", "state_keys"])
def test_error_of_periodic_work_is_reported(local: InProcess, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """uvicorn would end the frontend."""
    reported, fail = list[Exception](), Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(getattr(local.frontend.access, part), "reload", fail)
    monkeypatch.setattr(Frontend, "internal_error", lambda _, error: reported.append(error))
    eventually(lambda: len(reported) > 1)
    assert {type(error) for error in reported} == {ZeroDivisionError}, "the server goes on"
