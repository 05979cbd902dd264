"""A server made of one function, to be loaded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from loadtest.callers import Target

Handler = Callable[[int], Awaitable[bytes | None]]
"""What is said to the request of this number, counted from 0; None closes the connection instead."""


def reply(body: bytes, status: int = 200, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def answered(number: int) -> bytes:
    return reply(b'{"outputs": []}')


@contextlib.asynccontextmanager
async def answering(handler: Handler, idle_seconds: float = 60.0) -> AsyncIterator[Target]:
    """A server on a free port; connections on which nothing comes for `idle_seconds` are closed without a word."""
    requests = 0
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            while True:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), idle_seconds)
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
                number, requests = requests, requests + 1
                said = await handler(number)
                if said is None:
                    break
                writer.write(said)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield Target(host, port, "/infer")
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
