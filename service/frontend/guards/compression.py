"""Compresses replies, and decompresses bodies and messages, whose decompressed size counts in the budget of incomplete bodies."""

from __future__ import annotations

import asyncio
import zlib

from service.frontend.guards.body_budget import BodyBudget

WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""The accepted compressions, with the window bits that select each format in zlib."""
INLINE_BYTES = 1 << 9
"""Larger data is decompressed in a thread: 512 bytes may become half a megabyte."""


class NotCompressed(Exception):
    """The data is not compressed in the declared format. The message has the reason."""


async def decompress(data: bytes, window_bits: int, limit: int, bodies: BodyBudget) -> bytes:
    """Return the decompressed data, at most one byte more than the limit; raises NotCompressed, and Overloaded beyond the budget."""
    if len(data) <= INLINE_BYTES:
        return _decompress(data, window_bits, limit)
    with bodies.hold(len(data)):
        # Several threads would take the processors from the event loop, and memory that is not counted yet.
        await bodies.turns.take()
        work = asyncio.ensure_future(asyncio.to_thread(_decompress, data, window_bits, limit))
        work.add_done_callback(lambda _: bodies.turns.end())  # not before: the thread of a request that is cancelled works on
        body = await asyncio.shield(work)
        bodies.add(len(body))
        try:
            bodies.check()
            return body
        finally:
            bodies.add(-len(body))


def _decompress(data: bytes, window_bits: int, limit: int) -> bytes:
    decompressor = zlib.decompressobj(window_bits)
    try:
        body = decompressor.decompress(data, limit + 1)
    except zlib.error as error:
        raise NotCompressed(str(error)) from None
    if len(body) <= limit and (not decompressor.eof or decompressor.unused_data):
        raise NotCompressed("the compressed data is incomplete, or data follows it")
    return body


def compress(content: bytes | memoryview, encoding: str) -> bytes:
    """Return the content in one of the accepted compressions, at the fastest level."""
    compressor = zlib.compressobj(1, wbits=WINDOW_BITS[encoding])
    return compressor.compress(content) + compressor.flush()
