"""The load counts answers and their latency, refusals by code, and broken connections."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest import load
from loadtest.callers import Caller, Response, Target
from loadtest.load import Figures
from tests.loadtest.conftest import Handler, answered, answering, reply

SECONDS = 0.3


def requests(target: Target) -> Iterator[bytes]:
    return itertools.repeat(target.request(b'{"inputs": ["how far"]}'))


def closed(handler: Handler, callers: int = 2, seconds: float = SECONDS) -> Figures:
    async def run() -> Figures:
        async with answering(handler) as target:
            return await load.closed(target, requests(target), callers, seconds)

    return asyncio.run(run())


def test_closed_loop_keeps_every_caller_busy_until_the_end() -> None:
    open_now, max_open = 0, 0

    async def handler(number: int) -> bytes:
        nonlocal open_now, max_open
        open_now += 1
        max_open = max(max_open, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        return await answered(number)

    figures = closed(handler, callers=3)
    assert max_open == 3
    assert figures.failed == 0
    assert 3 < len(figures.answers) <= 3 * (SECONDS / 0.01 + 1)
    assert min(figures.answers) >= 0.009
    assert figures.seconds >= SECONDS
    assert figures.rate == pytest.approx(len(figures.answers) / figures.seconds)


def test_refusals_are_counted_by_status_and_code() -> None:
    async def handler(number: int) -> bytes:
        if number % 2:
            return reply(b'{"error": "5 wait", "code": "overloaded"}', 503)
        return reply(b"no JSON", 502)

    figures = closed(handler)
    assert not figures.answers
    assert set(figures.failures) == {"503 overloaded", "502"}
    assert math.isnan(figures.quantile(0.5))


def test_connection_closed_by_the_server_fails_and_is_replaced() -> None:
    async def handler(number: int) -> bytes | None:
        return None if number < 2 else await answered(number)

    figures = closed(handler)
    assert figures.failures == {"ConnectionResetError": 2}
    assert figures.answers


def test_answer_that_closes_its_connection_counts() -> None:
    async def handler(number: int) -> bytes:
        return reply(b"{}", 200, "Connection: close")

    figures = closed(handler)
    assert not figures.failures
    assert len(figures.answers) > 2


def test_response_that_is_not_http_fails() -> None:
    async def handler(number: int) -> bytes:
        return b"SSH-2.0-Other\r\n\r\n"

    figures = closed(handler, callers=1)
    assert set(figures.failures) == {"ConnectionResetError"}


def test_answer_may_arrive_in_pieces() -> None:
    whole = reply(b'{"outputs": [1]}', 503)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        for byte in whole:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()
        done.set()

    async def run() -> Response:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            target = Target(host, port, "/infer")
            caller = await Caller.connect(target)
            response = await caller.ask(target.request(b"{}"))
            await done.wait()
            caller.hang_up()
        return response

    done = asyncio.Event()
    assert asyncio.run(run()) == Response(503, b'{"outputs": [1]}')


def test_unanswered_requests_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "GRACE_SECONDS", 0.2)

    async def handler(number: int) -> bytes:
        await asyncio.sleep(60 if number < 3 else 0)
        return await answered(number)

    assert closed(handler, callers=3).failures == {"unanswered": 3}


def test_closed_loop_without_a_server_fails_immediately() -> None:
    target = Target("127.0.0.1", 9, "/infer")
    with pytest.raises(OSError, match=r"refused|failed"):
        asyncio.run(load.closed(target, requests(target), 1, SECONDS))


@pytest.mark.parametrize(("share", "seconds"), [(0.5, 5), (0.9, 9), (0.99, 10), (1.0, 10), (0.0, 1)])
def test_quantile_is_a_measured_time(share: float, seconds: float) -> None:
    assert Figures(answers=[float(seconds) for seconds in range(10, 0, -1)]).quantile(share) == seconds


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:8000", "127.0.0.1:8000", "http://"])
def test_malformed_address_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="is not an address of the form"):
        Target.of(url, "/infer")


def test_request_has_the_length_of_its_body() -> None:
    request: Any = Target.of("http://somewhere:81/", "/infer").request(b'{"a": 1}')
    assert request.startswith(b"POST /infer HTTP/1.1\r\nHost: somewhere\r\n")
    assert request.endswith(b"Content-Length: 8\r\n\r\n" + b'{"a": 1}')
