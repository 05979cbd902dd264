"""One connection of a client that sends any bytes, in any pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from tests.long.fuzz.wire.conversation import Conversation, Judgement, never

QUIET_SECONDS = 1.0
"""A client that gets nothing for this time closes its side, where the service waits for more without a limit."""
PATIENCE_SECONDS = 60.0
"""A connection that is open for longer is lost."""


class Line(asyncio.Protocol):
    """One connection."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._received = bytearray()
        self._closed = asyncio.get_running_loop().create_future()
        self._opened = asyncio.Event()
        self._transport: asyncio.Transport
        self._last = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._last = time.monotonic()
        if b"\r\n\r\n" in self._received:
            self._opened.set()
        if self._conversation.answered(bytes(self._received)):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._opened.set()
        if not self._closed.done():
            self._closed.set_result(None)

    async def talk(self, parts: list[bytes], *, quiet: bool, leaves: bool) -> bytes | None:
        """Send the parts, and return the bytes received until the connection ended; None if it did not end.

        quiet: whether this side closes when nothing more arrives. leaves: whether it aborts the connection at once.
        """
        if self._conversation.opening:
            self._transport.write(self._conversation.opening)
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._opened.wait()
        for part in parts:
            if self._closed.done():
                break
            self._transport.write(part)
            if len(parts) > 1:
                await asyncio.sleep(0)
        if leaves:
            self._transport.abort()
        end = time.monotonic() + PATIENCE_SECONDS
        while not self._closed.done() and time.monotonic() < end:
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET_SECONDS):
                    await asyncio.shield(self._closed)
            if quiet and not self._closed.done() and time.monotonic() - self._last > QUIET_SECONDS:
                self._transport.close()
        if self._closed.done():
            return bytes(self._received)
        self._transport.abort()
        return None


async def send(address: str, data: bytes, answered: Callable[[bytes], bool] = never) -> bytes:
    """Send bytes on a separate connection, and return the bytes received until it ends, or is answered."""
    target, conversation = urlsplit(address), Conversation(data, lambda _: Judgement(), answered)
    _, line = await asyncio.get_running_loop().create_connection(
        lambda: Line(conversation), str(target.hostname), int(target.port or 0)
    )
    received = await line.talk([data], quiet=False, leaves=False)
    assert received is not None, "the connection stayed open"
    return received
