"""Large answers: written in pieces, between which the event loop does other work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain

LARGE_ANSWER_BYTES = 1 << 16
"""Size of an engine's arrays above which their answer is written in pieces."""
PIECE_VALUES = 1 << 14
"""Numbers in a piece: half a millisecond of work."""
PIECE_BYTES = 1 << 17
"""Bytes that are written before the event loop may do other work."""
MAX_JOINED_BYTES = 4 << 20
"""Larger answers and bodies are joined in a thread: Python copies large pieces without the interpreter lock."""


class LargeAnswers:
    """Writes the large answers of a frontend, one at a time: several at once would delay small answers longer."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def join(self, parts: Iterable[bytes | memoryview]) -> bytes:
        """Return all parts joined."""
        written, size, pause_at = list[bytes](), 0, PIECE_BYTES
        async with self._turn:
            for piece in chain.from_iterable(map(_pieces, parts)):
                written.append(piece)
                size += len(piece)
                if size > pause_at:
                    pause_at = size + PIECE_BYTES
                    await asyncio.sleep(0)
        return b"".join(written) if size <= MAX_JOINED_BYTES else await asyncio.to_thread(b"".join, written)


def _pieces(part: bytes | memoryview) -> Iterable[bytes]:
    """Return a part in pieces. Bytes stay whole: a thread copies them without the interpreter lock, which it keeps for other memory."""
    if isinstance(part, bytes):
        return (part,)
    return (bytes(part[at : at + PIECE_BYTES]) for at in range(0, len(part), PIECE_BYTES))
