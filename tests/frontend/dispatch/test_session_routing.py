"""Requests of sessions as a front sends them, to engines that the test plays itself."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from service.errors import DeadlineExceeded, EngineLost, Overloaded, SessionLost, Unavailable, UnknownSession
from service.frontend.dispatch.connection import Answered
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.dispatch.placement import home
from service.ipc.channel import encode
from service.ipc.messages import Answer, Cancel, Done, EndSession, ExportSession, ImportSession, Refusal, Request
from service.metrics import Metrics
from tests.frontend.dispatch.test_dispatcher import Peer, meet, meet_two, request, run, send

NAMES = [str(number) for number in range(20)]
FIRST, SECOND = ([name for name in NAMES if home(name, 2) == place] for place in (0, 1))


async def chunk(engines: Dispatcher, session: str, tail: bytes = b"", seconds: float = 5.0) -> asyncio.Task[Answered]:
    """One that has been handed to an engine."""
    asked = msgspec.structs.replace(request(seconds, steps=1), session=session)
    task = asyncio.ensure_future(engines.submit(asked, tail))
    await asyncio.sleep(0)
    return task


async def lose(engines: Dispatcher, peer: Peer) -> None:
    """The engine ends, and the front has seen it."""
    devices = {device for one in engines.models for device in one.device.split(", ")}
    peer.channel.close()
    while {device for one in engines.models for device in one.device.split(", ")} == devices:
        await asyncio.sleep(0)


def test_every_chunk_goes_to_its_session_s_home_however_long_it_takes_there() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peers = await meet_two(engines)
        for name in NAMES * 2:
            await chunk(engines, name, name.encode())
        for peer, names in zip(peers, (FIRST, SECOND), strict=True):
            assert [frame.tail.decode() for frame in await peer.frames(2 * len(names))] == names * 2

    run(test, places=2)


def test_while_its_home_is_replaced_a_session_gets_503_and_others_are_answered() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        with pytest.raises(Unavailable, match="loading"):
            await chunk_result(engines, FIRST[0])
        one, other = await meet_two(engines)
        await lose(engines, one)
        with pytest.raises(EngineLost, match="of this session") as raised:
            await chunk_result(engines, FIRST[0])
        assert raised.value.retry_after == 1
        with pytest.raises(EngineLost, match="of this session"):
            await engines.end(FIRST[0])
        await chunk(engines, SECOND[0], b"unharmed")
        await send(engines, tail=b"stateless")
        assert [frame.tail for frame in await other.frames(2)] == [b"unharmed", b"stateless"]
        await lose(engines, other)
        with pytest.raises(EngineLost, match="no engine is left"):
            await chunk_result(engines, FIRST[0])

    run(test, places=2)


async def chunk_result(engines: Dispatcher, session: str) -> Answered:
    return await (await chunk(engines, session))


def test_a_chunk_whose_engine_ended_waits_for_the_successor_at_the_same_place_and_is_told_what_was_lost() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        task = await chunk(engines, FIRST[0], b"lost")
        [sent] = await one.frames(1)
        await lose(engines, one)
        other.channel.receive()
        await lose(engines, other)
        other = await meet(engines, 1)
        await chunk(engines, SECOND[0], b"of another")
        assert [frame.tail for frame in await other.frames(1)] == [b"of another"]
        successor = await meet(engines, 0)
        [again] = await successor.frames(1)
        assert (again.message, again.id, again.tail) == (
            msgspec.structs.replace(sent.message, resubmitted=True),
            sent.id,
            b"lost",
        )
        successor.send(encode(Refusal("session_lost", "its engine ended", "session"), again.id))
        with pytest.raises(SessionLost, match="its engine ended"):
            await task
        assert not metrics.rerun.values, "it was not run"

    run(test, places=2)


def test_a_chunk_may_wait_through_more_than_one_death_and_is_never_said_to_have_caused_them() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        task = await chunk(engines, "patient")
        for _ in range(3):
            await peer.frames(1)
            peer.channel.close()
            while engines.ready:
                await asyncio.sleep(0)
            peer = await meet(engines)
        [frame] = await peer.frames(1)
        assert isinstance(frame.message, Request)
        peer.answer(frame, backlog=0.0)
        assert (await task).answer == Answer((1, 1))

    run(test)


def test_a_chunk_whose_deadline_passes_meanwhile_says_that_the_engine_was_lost() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, _ = await meet_two(engines)
        task = await chunk(engines, FIRST[0], seconds=0.05)
        await one.frames(1)
        one.channel.close()
        with pytest.raises(EngineLost, match="before the deadline"):
            await task
        successor = await meet(engines, 0)
        with pytest.raises(DeadlineExceeded):
            await (await chunk(engines, FIRST[0], b"another", seconds=0.05))
        frames = await successor.frames(2)
        assert [(type(frame.message), frame.tail) for frame in frames] == [(Request, b"another"), (Cancel, b"")]

    run(test, places=2)


def test_a_caller_who_leaves_while_his_chunk_waits_is_forgotten() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, _ = await meet_two(engines)
        task = await chunk(engines, FIRST[0])
        await one.frames(1)
        await lose(engines, one)
        task.cancel()
        await asyncio.wait([task])
        successor = await meet(engines, 0)
        await chunk(engines, FIRST[1], b"the next")
        assert [frame.tail for frame in await successor.frames(1)] == [b"the next"]

    run(test, places=2)


def test_a_state_is_exported_adopted_and_ended_at_the_session_s_home() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        export = asyncio.ensure_future(engines.export(FIRST[0]))
        adopt = asyncio.ensure_future(engines.adopt(SECOND[0], b"state"))
        [frame] = await one.frames(1)
        assert (frame.message, frame.tail) == (ExportSession(FIRST[0]), b"")
        one.send(encode(Done(), frame.id, (b"its state",)))
        assert await export == b"its state"
        [frame] = await other.frames(1)
        assert (frame.message, frame.tail) == (ImportSession(SECOND[0]), b"state")
        other.send(encode(Done(), frame.id))
        await adopt
        end = asyncio.ensure_future(engines.end(FIRST[0]))
        [frame] = await one.frames(1)
        assert frame.message == EndSession(FIRST[0])
        one.send(encode(Refusal("unknown_session", "it is not open", "session"), frame.id))
        with pytest.raises(UnknownSession, match="not open"):
            await end

    run(test, places=2)


def test_what_was_asked_of_an_engine_that_ends_is_not_asked_of_its_successor() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        asked = [asyncio.ensure_future(one) for one in (engines.export("a"), engines.adopt("b", b"state"), engines.end("c"))]
        await peer.frames(3)
        peer.channel.close()
        for one in asked:
            with pytest.raises(EngineLost, match="before it replied"):
                await one
        successor = await meet(engines)
        await chunk(engines, "d")
        assert [type(frame.message) for frame in await successor.frames(1)] == [Request]

    run(test)


def test_states_have_no_more_room_in_a_channel_than_requests() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        first = asyncio.ensure_future(engines.adopt("a", bytes(6_000)))
        [frame] = await peer.frames(1)
        for refused in (engines.adopt("b", bytes(6_000)), engines.submit(request(), bytes(6_000))):
            with pytest.raises(Overloaded, match="SEQSERVE_CHANNEL_BYTES is 10000"):
                await refused
        peer.send(encode(Done(), frame.id))
        await first
        second = asyncio.ensure_future(engines.adopt("b", bytes(6_000)))
        await peer.frames(1)
        second.cancel()

    run(test)
