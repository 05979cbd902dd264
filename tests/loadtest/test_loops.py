"""The loops count right answers only, and an open loop counts latency from the time when a request was due."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import uvloop
from msgspec import structs

from loadtest.generator.job import Job, Result
from loadtest.generator.loops import WRONG, run
from loadtest.target import Target

Handler = Callable[[int], Awaitable[bytes | None]]
"""Returns the response to the request with this number, counted from 0; None closes the connection."""


def reply(body: bytes, status: int = 200) -> bytes:
    return f"HTTP/1.1 {status} Reason\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[Target]:
    """Run an HTTP server made of one function on a free port."""
    numbers = count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
                response = await handler(next(numbers))
                if response is None:
                    break
                writer.write(response)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield Target(host, port, "/infer")
    server.close()


SCORES = [0.5, 0.25]
RIGHT, NEARLY, FALSE, NOT_A_NUMBER = (
    reply(json.dumps({"outputs": [{"scores": {"yes": score, "no": 0.25}}]}).encode())
    for score in (0.5, 0.50004, 0.6, float("nan"))
)


def job(**options: Any) -> Job:
    return structs.replace(Job("http", "127.0.0.1", 0, "", [], "infer", [SCORES], seconds=0.3), **options)


def loaded(handler: Handler, **options: Any) -> Result:
    """Return the result of a job on a small server."""

    async def measured() -> Result:
        async with answering(handler) as target:
            return await run(job(port=target.port, requests=[target.request(b"{}")], **options))

    return uvloop.run(measured())


def in_turn(*responses: bytes | None, seconds: float = 0.001) -> Handler:
    async def handler(number: int) -> bytes | None:
        await asyncio.sleep(seconds)
        return responses[number % len(responses)]

    return handler


def test_closed_loop_counts_right_answers_after_the_warm_up() -> None:
    calls: list[int] = []

    async def handler(number: int) -> bytes:
        calls.append(number)
        await asyncio.sleep(0.01)
        return FALSE if number < 2 else (RIGHT, NEARLY)[number % 2]

    result = loaded(handler, callers=3, warm_up=0.2)
    assert not result.failures
    assert 3 < result.answers == len(result.ordered_latencies()) < len(calls)
    assert result.ordered_latencies()[0] >= 0.009


def test_faults_are_failures_and_no_answers() -> None:
    faults = [FALSE, reply(b"no JSON"), NOT_A_NUMBER, reply(b'{"code": "overloaded"}', 503), None]
    result = loaded(in_turn(RIGHT, *faults), seconds=0.6)
    assert result.failures.keys() == {WRONG, "status 503 overloaded", "closed by the server"} and result.answers > 0
    assert loaded(in_turn(FALSE)).failures.keys() == {WRONG}


def test_open_loop_counts_from_the_due_time() -> None:
    """One connection takes 20 ms for a request, and ten times as many are due: each waits for all before it."""
    result = loaded(in_turn(RIGHT, seconds=0.02), rate=500, seconds=0.5)
    assert result.answers <= 26 < 150 < result.due
    assert result.ordered_latencies()[-1] > 0.3, "a request that was due in the first half is answered at the end or later"
    assert not result.failures
