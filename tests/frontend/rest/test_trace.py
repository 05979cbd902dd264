"""A trace as a front asks for it, of engines that the test plays itself."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import EngineLost, Overloaded, Unavailable
from service.frontend.dispatch import dispatcher as module
from service.frontend.dispatch.dispatcher import Dispatcher
from service.ipc.channel import encode
from service.ipc.messages import Cancel, Done, RecordTrace, Refusal
from service.metrics import Metrics
from tests.frontend.dispatch.test_dispatcher import Peer, meet, meet_two, run


async def asked(engines: Dispatcher, *peers: Peer) -> tuple[asyncio.Task[list[bytes]], list[int]]:
    """A trace that these engines have heard of, and the ids by which they answer."""
    task = asyncio.ensure_future(engines.trace(20, 1.5))
    frames = [frame for peer in peers for frame in await peer.frames(1)]
    assert [(type(frame.message), frame.message) for frame in frames] == [(RecordTrace, RecordTrace(20, 1.5))] * len(peers)
    return task, [frame.id for frame in frames]


def test_every_engine_records_and_the_answers_stand_in_their_order() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        task, (first, second) = await asked(engines, one, other)
        other.send(encode(Done(), second, (b"[2]",)))
        one.send(encode(Done(), first, (b"[1]",)))
        assert await task == [b"[1]", b"[2]"]

    run(test)


def test_an_engine_that_refuses_is_heard_and_the_others_are_told_to_give_up() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        one, other = await meet_two(engines)
        task, (first, second) = await asked(engines, one, other)
        one.send(encode(Refusal("overloaded", "a trace is being recorded", None, 1), first))
        with pytest.raises(Overloaded, match="being recorded"):
            await task
        [frame] = await other.frames(1)
        assert (type(frame.message), frame.id) == (Cancel, second)

    run(test)


def test_an_engine_that_ends_meanwhile_is_named_as_the_reason() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        task, _ = await asked(engines, peer)
        peer.channel.close()
        with pytest.raises(EngineLost, match="ended before it replied"):
            await task

    run(test)


def test_a_caller_who_leaves_and_one_who_waited_long_enough_are_told_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        peer = await meet(engines)
        task, [id] = await asked(engines, peer)
        task.cancel()
        assert [(type(frame.message), frame.id) for frame in await peer.frames(1)] == [(Cancel, id)]
        monkeypatch.setattr(module, "TRACED_SECONDS", -1.4)
        with pytest.raises(Unavailable, match="did not reply to RecordTrace within"):
            await engines.trace(20, 1.5)
        assert [type(frame.message) for frame in await peer.frames(2)] == [RecordTrace, Cancel]
        peer.send(encode(Done(), id, (b"[]",)))

    run(test)


def test_without_an_engine_nothing_is_recorded() -> None:
    async def test(engines: Dispatcher, metrics: Metrics) -> None:
        with pytest.raises(Unavailable, match="loading"):
            await engines.trace(20, 1.5)

    run(test)
