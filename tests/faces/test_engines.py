"""The front's end of the engine, against a peer that the test plays itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from service.channel import Channel, Frame, Kind, encode, pair
from service.errors import DeadlineExceeded, EngineLost, Overloaded, Unavailable, UnknownModel
from service.faces.engines import Answered, Engines
from service.metrics import Metrics
from service.sequence import Answer, Hello, Loaded, Refusal, Request

HELLO = Hello([Loaded("words", "1", "cpu", [], 0)])


class Peer:
    """An engine process as the front sees it."""

    def __init__(self, engines: Engines) -> None:
        mine, theirs = pair()
        self.channel = Channel(mine)
        engines.attach(Channel(theirs))
        self.send(encode(Kind.HELLO, 0, HELLO))

    def send(self, frame: bytes) -> None:
        self.channel.send(frame)
        self.channel.flush()

    async def frames(self, count: int) -> list[Frame]:
        """The next `count` frames that the front sends."""
        frames: list[Frame] = []
        while len(frames) < count:
            await asyncio.sleep(0.001)
            frames += self.channel.receive()
        return frames


def request(seconds: float = 5.0) -> Request:
    now = time.monotonic()
    return Request("words", "1", [2], deadline=now + seconds, sent=now)


def run(test: Callable[[Engines, Metrics], Awaitable[None]], channel_bytes: int = 10_000) -> None:
    async def within_a_loop() -> None:
        metrics = Metrics()
        engines = Engines(metrics, channel_bytes, lambda: None)
        try:
            await asyncio.wait_for(test(engines, metrics), 10)
        finally:
            engines.close()
            while met:
                met.pop().channel.close()

    met.clear()
    asyncio.run(within_a_loop())


met: list[Peer] = []


async def meet(engines: Engines) -> Peer:
    peer = Peer(engines)
    met.append(peer)
    while not engines.ready:
        await asyncio.sleep(0)
    return peer


def test_an_answer_finds_its_request_whatever_the_order() -> None:
    async def test(engines: Engines, metrics: Metrics) -> None:
        peer = await meet(engines)
        first, second = (asyncio.ensure_future(engines.submit(request(), tail)) for tail in (b"first", b"second"))
        for frame in reversed(await peer.frames(2)):
            peer.send(encode(Kind.ANSWER, frame.id, Answer((1, 2)), (frame.tail,)))
        assert [await first, await second] == [Answered(Answer((1, 2)), b"first"), Answered(Answer((1, 2)), b"second")]

    run(test)


def test_what_leaves_in_one_tick_leaves_in_one_write() -> None:
    async def test(engines: Engines, metrics: Metrics) -> None:
        peer = await meet(engines)
        calls = [asyncio.ensure_future(engines.submit(request(), b"x")) for _ in range(20)]
        for frame in await peer.frames(20):
            peer.send(encode(Kind.ANSWER, frame.id, Answer((1, 1)), (b"0000",)))
        await asyncio.gather(*calls)
        assert metrics.channel_writes.values[("front",)] == [1]

    run(test)


def test_a_refusal_is_raised_as_the_error_that_it_was() -> None:
    async def test(engines: Engines, metrics: Metrics) -> None:
        peer = await meet(engines)
        call = asyncio.ensure_future(engines.submit(request(), b""))
        (frame,) = await peer.frames(1)
        peer.send(encode(Kind.REFUSAL, frame.id, Refusal("unknown_model", "no such model", "model", 3)))
        with pytest.raises(UnknownModel, match="no such model") as raised:
            await call
        assert (raised.value.field, raised.value.retry_after) == ("model", 3)

    run(test)


def test_a_full_channel_refuses_until_an_answer_makes_room() -> None:
    async def test(engines: Engines, metrics: Metrics) -> None:
        peer = await meet(engines)
        first = asyncio.ensure_future(engines.submit(request(), bytes(6_000)))
        (frame,) = await peer.frames(1)
        with pytest.raises(Overloaded, match="SEQSERVE_CHANNEL_BYTES is 10000") as raised:
            await engines.submit(request(), bytes(6_000))
        assert raised.value.retry_after == 1
        peer.send(encode(Kind.ANSWER, frame.id, Answer((1, 1))))
        await first
        with pytest.raises(DeadlineExceeded):
            await engines.submit(request(0.01), bytes(6_000))

    run(test)


def test_a_passed_deadline_and_a_cancelled_caller_are_told_to_the_engine() -> None:
    async def test(engines: Engines, metrics: Metrics) -> None:
        peer = await meet(engines)
        with pytest.raises(DeadlineExceeded):
            await engines.submit(request(0.05), b"")
        leaving = asyncio.ensure_future(engines.submit(request(), b""))
        await asyncio.sleep(0.01)
        leaving.cancel()
        frames = await peer.frames(4)
        assert [frame.kind for frame in frames] == [Kind.SUBMIT, Kind.CANCEL, Kind.SUBMIT, Kind.CANCEL]
        assert [frames[0].id, frames[2].id] == [frames[1].id, frames[3].id]

    run(test)


def test_nothing_is_taken_before_the_first_engine_and_between_two() -> None:
    async def test(engines: Engines, metrics: Metrics) -> None:
        with pytest.raises(Unavailable):
            await engines.submit(request(), b"")
        peer = await meet(engines)
        peer.channel.close()
        while engines.ready:
            await asyncio.sleep(0)
        with pytest.raises(EngineLost):
            await engines.submit(request(), b"")

    run(test)


def test_what_a_lost_engine_had_is_run_once_more_and_not_twice() -> None:
    async def test(engines: Engines, metrics: Metrics) -> None:
        call = None
        for _ in range(2):
            peer = await meet(engines)
            call = call or asyncio.ensure_future(engines.submit(request(), b"again"))
            (frame,) = await peer.frames(1)
            assert (frame.kind, frame.tail) == (Kind.SUBMIT, b"again")
            assert not call.done()
            peer.channel.close()
            while engines.ready:
                await asyncio.sleep(0)
        assert call is not None
        with pytest.raises(EngineLost, match="third time"):
            await call
        assert metrics.rerun.values[()] == [1]

    run(test)


def test_an_answer_nobody_waits_for_is_dropped() -> None:
    async def test(engines: Engines, metrics: Metrics) -> None:
        peer = await meet(engines)
        peer.send(encode(Kind.ANSWER, 99, Answer((1, 1))))
        call = asyncio.ensure_future(engines.submit(request(), b""))
        (frame,) = await peer.frames(1)
        peer.send(encode(Kind.ANSWER, frame.id, Answer((1, 1))))
        await call

    run(test)
