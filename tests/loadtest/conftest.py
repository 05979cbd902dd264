"""An HTTP server made of one function, for tests of the load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from loadtest.target import Target

Handler = Callable[[int], Awaitable[bytes | None]]
"""Returns the response to the request with this number, counted from 0; None closes the connection."""


def reply(body: bytes, status: int = 200, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Reason", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def answered(number: int) -> bytes:
    return reply(b'{"outputs": []}')


@contextlib.asynccontextmanager
async def answering(handler: Handler, idle_seconds: float = 60.0) -> AsyncIterator[Target]:
    """Run a server on a free port that closes connections after `idle_seconds` without a request."""
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
                response = await handler(number)
                if response is None:
                    break
                writer.write(response)
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
