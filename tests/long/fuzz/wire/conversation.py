"""One connection of a client that sends any bytes, in any pieces, and the changes of bytes that attackers and broken clients make."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(slots=True)
class Judgement:
    """The replies on one connection by status, and their faults."""

    replies: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    """The fields of header blocks, which came compressed."""


def never(received: bytes) -> bool:
    """Return that the client waits for the end of the connection."""
    return False


@dataclass(frozen=True, slots=True)
class Conversation:
    """One connection.

    opening: the first bytes of the client; it waits for the head of the reply. data: its later bytes. judge: takes the received bytes.
    answered: returns whether the last request is answered, so that the client may close the connection; the default is that the service
    closes it.
    """

    data: bytes
    judge: Callable[[bytes], Judgement]
    answered: Callable[[bytes], bool] = never
    opening: bytes = b""


# The connection.

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


# Changes of bytes.

MOST_CHANGES = 4
TOKENS = [
    *b"""-1 0 1e400 NaN Infinity -0 9223372036854775808 99999999999999999999 1.5 +5 null true {} [] "" { [ ] } " , : \\u0000 \\ud800
%00 %2e%2e%2f ../../etc/passwd ..\\..\\boot.ini /etc/passwd %2e%2e/%2e%2e/etc/passwd ${jndi:ldap://127.0.0.1/a} chunked gzip""".split(),
    *(b"", b"\0", b"\r\n", b"\n", b"\r\n\r\n", b" ", b"\t", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x8c\x8a"),
    *(b"x" * 200, b"a" * 2000, b"\x80" * 17, b"\0\0\0\0\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"'; DROP TABLE"),
    *(b"[" * 40, b'{"a":' * 40),
]
"""Values that parsers tend to treat specially."""

Change = Callable[[bytearray, random.Random], None]


def _flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _replace(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] = chance.randrange(256)


def _delete(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.randint(1, 8)]


def _insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randint(0, len(data))
    data[at:at] = chance.choice(TOKENS)


def _overwrite(data: bytearray, chance: random.Random) -> None:
    at, token = chance.randrange(len(data)), chance.choice(TOKENS)
    data[at : at + len(token)] = token


def _repeat(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    part = data[start : start + chance.randint(1, 64)]
    data[start:start] = part * chance.randint(1, 4)


def _swap(data: bytearray, chance: random.Random) -> None:
    one, other = chance.randrange(len(data)), chance.randrange(len(data))
    data[one], data[other] = data[other], data[one]


CHANGES: Sequence[Change] = (_flip, _flip, _replace, _delete, _insert, _insert, _overwrite, _repeat, _swap)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one or more changes."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, MOST_CHANGES)):
        if not changed:
            break
        chance.choice(CHANGES)(changed, chance)
    return bytes(changed)


def pieces(data: bytes, chance: random.Random) -> list[bytes]:
    """Return the bytes as a client sends them: mostly at once, sometimes in pieces."""
    way = chance.random()
    if way < 0.7 or len(data) < 2:
        return [data]
    cuts = sorted(chance.sample(range(1, len(data)), min(len(data) - 1, 1 if way < 0.9 else chance.randint(2, 12))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
