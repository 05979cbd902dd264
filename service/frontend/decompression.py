"""Decompresses bodies and messages. What they become counts in the same budget as a body of that size that arrives."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from service.frontend.body_budget import BodyBudget
from service.frontend.memory_guard import LARGE_BYTES

WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""The accepted compressions, with the window bits that select each format in zlib."""
PIECE_BYTES = 1 << 22
"""Bytes that are decompressed before they are counted: 16 KB may become 16 MB."""


class NotCompressed(Exception):
    """The data is not compressed as its client says. The text says why."""


async def decompress(data: bytes, window_bits: int, limit: int, bodies: BodyBudget) -> bytes:
    """Return the decompressed data, at most one byte more than the limit; raises NotCompressed, and Overloaded beyond the budget."""
    decompressor, most = zlib.decompressobj(window_bits), min(LARGE_BYTES, limit + 1)
    try:
        if len(data) <= LARGE_BYTES:
            part = decompressor.decompress(data, most)
            if decompressor.eof or len(part) < most or most > limit:
                return _whole(decompressor, part, limit)
            data = decompressor.unconsumed_tail
        else:
            part = b""
        with bodies.hold(len(data) + len(part)):
            await bodies.turns.take()  # many threads would take the processors from the event loop
            try:
                return await _decompress_large(decompressor, part, data, limit, bodies)
            finally:
                bodies.turns.end()
    except zlib.error as error:
        raise NotCompressed(str(error)) from None


async def _decompress_large(decompressor: Any, part: bytes, data: bytes, limit: int, bodies: BodyBudget) -> bytes:
    """Return what was decompressed already and the rest. In threads, which do not hold the interpreter lock meanwhile."""
    parts, size, full = [part], len(part), True
    try:
        while full and not decompressor.eof:
            most = min(PIECE_BYTES, limit + 1 - size)
            parts.append(await asyncio.to_thread(decompressor.decompress, data, most))
            data, full = decompressor.unconsumed_tail, len(parts[-1]) == most
            size += len(parts[-1])
            bodies.add(len(parts[-1]))
            if size > limit:
                break
            bodies.check()
        return _whole(decompressor, await asyncio.to_thread(b"".join, parts), limit)
    finally:
        bodies.add(len(part) - size)


def _whole(decompressor: Any, data: bytes, limit: int) -> bytes:
    if len(data) <= limit and (not decompressor.eof or decompressor.unused_data):
        raise NotCompressed("the compressed data is incomplete, or data follows it")
    return data
