"""Decompressed bytes count in the budget of bodies while they are decompressed, and not afterwards."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable

import pytest

from service.errors import Overloaded
from service.frontend.guards.body_budget import BodyBudget
from service.frontend.guards.compression import INLINE_BYTES, WINDOW_BITS, NotCompressed, decompress
from service.frontend.guards.memory_guard import LARGE_BYTES
from tests.frontend.guards.test_memory_guard import LIMIT, Memory

SIZES = [0, 1, INLINE_BYTES, LARGE_BYTES, 1 << 22]
BOMB = gzip.compress(bytes(LIMIT))


def run(data: bytes, limit: int, bodies: BodyBudget, encoding: str = "gzip") -> bytes:
    return asyncio.run(decompress(data, WINDOW_BITS[encoding], limit, bodies))


@pytest.mark.parametrize("size", SIZES)
def test_data_of_every_size_is_whole(size: int) -> None:
    """Also if it does not become smaller. At the limit it is whole, beyond the limit one more byte shows it."""
    bodies = BodyBudget(LIMIT, Memory(max_share=1))
    for data in (bytes(size), b"".join(zlib.adler32(b"%d" % at).to_bytes(4) for at in range(size // 4 + 1))[:size]):
        assert run(gzip.compress(data), max(1, size), bodies) == data
        assert run(zlib.compress(data), LIMIT, bodies, "deflate") == data
        if size > 1:
            assert run(gzip.compress(data), size - 1, bodies) == data
            assert len(run(gzip.compress(data), size - 2, bodies)) == size - 1
        for wrong in (gzip.compress(data)[:-1], gzip.compress(data) + b"x", b"x" + data):
            with pytest.raises(NotCompressed):
                run(wrong, LIMIT, bodies)
    assert bodies.held_bytes == 0


def test_bomb_is_refused_at_the_budget_and_leaves_nothing() -> None:
    bodies = BodyBudget(LIMIT // 2, Memory(max_share=1))
    with pytest.raises(Overloaded, match=f"the limit is {LIMIT // 2}"):
        run(BOMB, LIMIT, bodies)
    assert bodies.held_bytes == 0
    with pytest.raises(Overloaded, match="memory limit"):
        run(BOMB, LIMIT, BodyBudget(LIMIT, Memory(86)))


def test_bodies_are_decompressed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a client disconnects: its thread works on, and many would take the processors."""

    async def disconnect() -> None:
        began, end, bodies = list[bytes](), asyncio.Event(), BodyBudget(LIMIT, Memory(max_share=1))

        async def in_thread(work: Callable[..., bytes], data: bytes, *arguments: int) -> bytes:
            began.append(data)
            await end.wait()
            return work(data, *arguments)

        monkeypatch.setattr(asyncio, "to_thread", in_thread)
        data = gzip.compress(bytes(1 << 20))
        running, waiting, last = (asyncio.ensure_future(decompress(data, WINDOW_BITS["gzip"], LIMIT, bodies)) for _ in range(3))
        for call in (running, waiting):
            await asyncio.sleep(0)
            call.cancel()
        await asyncio.wait([running, waiting])
        await asyncio.sleep(0)
        assert len(began) == 1 and bodies.held_bytes == len(data)
        end.set()
        assert await last == bytes(1 << 20) and len(began) == 2 and bodies.held_bytes == 0

    asyncio.run(disconnect())
