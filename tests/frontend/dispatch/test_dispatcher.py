"""The front's end of the engines, against peers that the test plays itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from service.errors import DeadlineExceeded, EngineLost, Overloaded, Unavailable, UnknownModel
from service.frontend.dispatch.connection import Answered
from service.frontend.dispatch.dispatcher import Dispatcher
from service.ipc.channel import Channel, Frame, encode, pair
from service.ipc.messages import Answer, Backlog, Cancel, EngineStatus, LoadedModel, Refusal, Request
from service.metrics import Metrics

SECOND_A_TOKEN = 1.0


class Clock:
    """A time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Peer:
    """An engine process as the front sees it: a request costs a second for each step of its sequences."""

    def __init__(self, engines: Dispatcher, place: int) -> None:
        mine, theirs = pair()
        self.channel = Channel(mine)
        engines.attach(Channel(theirs))
        backends = ["lstm: framework", f"head: of {place}"]
        model = LoadedModel("words", "1", f"cuda:{place}", backends, 7, per_step=0.0, per_token=SECOND_A_TOKEN)
        self.send(encode(EngineStatus([model], place)))

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

    def answer(self, *frames: Frame, backlog: float) -> None:
        """Answers, and what is left to do, in one write."""
        answers = b"".join(encode(Answer((1, 1)), frame.id) for frame in frames)
        self.send(answers + encode(Backlog(backlog, self.channel.frames_received)))


def request(seconds: float = 5.0, steps: int = 2) -> Request:
    now = time.monotonic()
    return Request("words", "1", [steps], deadline=now + seconds, sent=now)


def run(
    test: Callable[[Dispatcher, Metrics], Awaitable[None]],
    channel_bytes: int = 10_000,
    places: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    async def within_a_loop() -> None:
        metrics = Metrics()
        engines = Dispatcher(metrics, channel_bytes, lambda: None, places, clock)
        try:
            await asyncio.wait_for(test(engines, metrics), 10)
        finally:
            engines.close()
            while met:
                met.pop().channel.close()

    met.clear()
    asyncio.run(within_a_loop())


met: list[Peer] = []


async def meet(engines: Dispatcher, place: int = 0) -> Peer:
    peer = Peer(engines, place)
    met.append(peer)
    while not any(f"cuda:{place}" in one.device for one in engines.models):
        await asyncio.sleep(0)
    return peer


async def meet_two(engines: Dispatcher) -> tuple[Peer, Peer]:
    return await meet(engines, 0), await meet(engines, 1)


async def send(engines: Dispatcher, steps: int = 1, tail: bytes = b"") -> asyncio.Task[Answered]:
    """A request that has been handed to an engine."""
    task = asyncio.ensure_future(engines.submit(request(steps=steps), tail))
    await asyncio.sleep(0)
    return task


def test_an_answer_finds_its_request_whatever_the_order() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        first, second = (asyncio.ensure_future(engines.submit(request(), tail)) for tail in (b"first", b"second"))
        for frame in reversed(await peer.frames(2)):
            peer.send(encode(Answer((1, 2)), frame.id, (frame.tail,)))
        assert [await first, await second] == [Answered(Answer((1, 2)), b"first"), Answered(Answer((1, 2)), b"second")]

    run(test)


def test_what_leaves_in_one_tick_leaves_in_one_write() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        calls = [asyncio.ensure_future(engines.submit(request(), b"x")) for _ in range(20)]
        for frame in await peer.frames(20):
            peer.send(encode(Answer((1, 1)), frame.id, (b"0000",)))
        await asyncio.gather(*calls)
        assert metrics.channel_writes.values[("frontend",)] == [1]

    run(test)


def test_a_refusal_is_raised_as_the_error_that_it_was() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        call = asyncio.ensure_future(engines.submit(request(), b""))
        (frame,) = await peer.frames(1)
        peer.send(encode(Refusal("unknown_model", "no such model", "model", 3), frame.id))
        with pytest.raises(UnknownModel, match="no such model") as raised:
            await call
        assert (raised.value.field, raised.value.retry_after) == ("model", 3)

    run(test)


def test_a_full_channel_refuses_until_an_answer_makes_room() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        first = asyncio.ensure_future(engines.submit(request(), bytes(6_000)))
        (frame,) = await peer.frames(1)
        with pytest.raises(Overloaded, match="SEQSERVE_CHANNEL_BYTES is 10000") as raised:
            await engines.submit(request(), bytes(6_000))
        assert raised.value.retry_after == 1
        peer.send(encode(Answer((1, 1)), frame.id))
        await first
        with pytest.raises(DeadlineExceeded):
            await engines.submit(request(0.01), bytes(6_000))

    run(test)


def test_a_passed_deadline_and_a_cancelled_caller_are_told_to_the_engine() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        with pytest.raises(DeadlineExceeded):
            await engines.submit(request(0.05), b"")
        leaving = asyncio.ensure_future(engines.submit(request(), b""))
        await asyncio.sleep(0.01)
        leaving.cancel()
        frames = await peer.frames(4)
        assert [type(frame.message) for frame in frames] == [Request, Cancel, Request, Cancel]
        assert [frames[0].id, frames[2].id] == [frames[1].id, frames[3].id]

    run(test)


def test_nothing_is_taken_before_the_first_engine_and_between_two() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
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
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        call = None
        for _ in range(2):
            peer = await meet(engines)
            call = call or asyncio.ensure_future(engines.submit(request(), b"again"))
            (frame,) = await peer.frames(1)
            assert (type(frame.message), frame.tail) == (Request, b"again")
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
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        peer.send(encode(Answer((1, 1)), 99))
        call = asyncio.ensure_future(engines.submit(request(), b""))
        (frame,) = await peer.frames(1)
        peer.send(encode(Answer((1, 1)), frame.id))
        await call

    run(test)


def test_engines_that_wait_equally_long_take_turns() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peers = [await meet(engines, place) for place in range(3)]
        for number in range(6):
            await send(engines, tail=str(number).encode())
        assert [[frame.tail for frame in await peer.frames(2)] for peer in peers] == [[b"0", b"3"], [b"1", b"4"], [b"2", b"5"]]

    run(test)


def test_a_request_goes_where_what_was_sent_takes_the_shortest() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        await send(engines, steps=10)
        for _ in range(10):
            await send(engines, tail=b"short")
        assert [frame.tail for frame in await one.frames(1)] == [b""]
        assert [frame.tail for frame in await other.frames(10)] == [b"short"] * 10
        await send(engines, tail=b"now equal")
        assert [frame.tail for frame in await one.frames(1)] == [b"now equal"]

    run(test)


def test_what_an_engine_reports_holds_back_requests_until_that_time_has_passed() -> None:
    clock = Clock()

    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        calls = [await send(engines), await send(engines)]
        one.answer(*await one.frames(1), backlog=2.5)
        other.answer(*await other.frames(1), backlog=0.0)
        await asyncio.gather(*calls)
        for number in range(3):
            await send(engines, tail=str(number).encode())
        assert [frame.tail for frame in await other.frames(3)] == [b"0", b"1", b"2"]
        clock.now += 0.5
        await send(engines, tail=b"3")
        assert [frame.tail for frame in await one.frames(1)] == [b"3"]

    run(test, clock=clock)


def test_what_an_engine_had_not_read_when_it_reported_is_counted_beside_the_report() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        first, _ = await send(engines), await send(engines, steps=4)
        (read,) = await one.frames(1)
        await send(engines, steps=4)
        await asyncio.sleep(0)
        one.answer(read, backlog=0.0)
        await first
        await send(engines, tail=b"equal, and chosen longest ago")
        assert [frame.tail for frame in await other.frames(2)] == [b"", b"equal, and chosen longest ago"]

    run(test)


def test_what_was_given_up_is_not_waited_for() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, _ = await meet_two(engines)
        leaving, _ = await send(engines, steps=9), await send(engines, steps=3)
        leaving.cancel()
        await asyncio.wait([leaving])
        await send(engines, tail=b"next")
        assert [(type(frame.message), frame.tail) for frame in await one.frames(3)] == [
            (Request, b""),
            (Cancel, b""),
            (Request, b"next"),
        ]

    run(test)


def test_the_bytes_of_a_channel_are_each_engine_s_own() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        calls = [await send(engines, tail=bytes(6_000)) for _ in range(2)]
        with pytest.raises(Overloaded, match="SEQSERVE_CHANNEL_BYTES is 10000"):
            await engines.submit(request(), bytes(6_000))
        other.answer(*await other.frames(1), backlog=100.0)
        await calls[1]
        await send(engines, tail=bytes(6_000))
        assert len(await other.frames(1)) == 1, "the one with room, however long it takes there"
        assert len(await one.frames(1)) == 1

    run(test)


def test_what_a_lost_engine_had_runs_at_once_on_another() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        calls = [await send(engines, tail=tail) for tail in (b"first", b"second", b"third")]
        await one.frames(2)
        one.channel.close()
        frames = await other.frames(3)
        assert [frame.tail for frame in frames] == [b"second", b"first", b"third"]
        assert engines.ready
        other.answer(*frames, backlog=0.0)
        await asyncio.gather(*calls)
        assert metrics.rerun.values[()] == [2]

    run(test)


def test_what_two_of_three_engines_died_with_does_not_reach_the_third() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peers = [await meet(engines, place) for place in range(3)]
        call = await send(engines, tail=b"deadly")
        for peer in peers[:2]:
            assert [frame.tail for frame in await peer.frames(1)] == [b"deadly"]
            peer.channel.close()
        with pytest.raises(EngineLost, match="third time"):
            await call
        await send(engines, tail=b"harmless")
        assert [frame.tail for frame in await peers[2].frames(1)] == [b"harmless"]

    run(test)


def test_a_caller_who_leaves_after_a_death_is_told_to_the_engine_that_has_the_request_now() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        leaving = await send(engines)
        await one.frames(1)
        one.channel.close()
        (again,) = await other.frames(1)
        leaving.cancel()
        (frame,) = await other.frames(1)
        assert (type(frame.message), frame.id) == (Cancel, again.id)

    run(test)


def test_a_deadline_that_passes_without_an_engine_says_that_it_was_lost() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        call = asyncio.ensure_future(engines.submit(request(0.05), b""))
        await peer.frames(1)
        peer.channel.close()
        with pytest.raises(EngineLost, match="before the deadline"):
            await call
        successor = await meet(engines)
        await send(engines, tail=b"another")
        assert [frame.tail for frame in await successor.frames(1)] == [b"another"], "nobody waits for the first one"

    run(test)


def test_a_model_on_several_devices_is_listed_once_in_the_order_of_the_engines() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        assert engines.models == []
        await meet(engines, 1)
        first = await meet(engines, 0)
        [model] = engines.models
        assert (model.device, model.weight_bytes) == ("cuda:0, cuda:1", 7)
        assert model.backends == ["lstm: framework", "head: of 0", "head: of 1"]
        first.channel.close()
        while len(engines.models[0].backends) > 2:
            await asyncio.sleep(0)
        assert engines.models[0].device == "cuda:1"

    run(test)
