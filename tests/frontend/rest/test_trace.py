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
from tests.frontend.dispatch.test_dispatcher import EngineProcess, meet, meet_two, run


async def asked(dispatcher: Dispatcher, *engine_processes: EngineProcess) -> tuple[asyncio.Task[list[bytes]], list[int]]:
    """A trace that these engines have heard of, and the ids by which they answer."""
    task = asyncio.ensure_future(dispatcher.trace(20, 1.5))
    frames = [frame for engine in engine_processes for frame in await engine.frames(1)]
    assert [(type(frame.message), frame.message) for frame in frames] == [(RecordTrace, RecordTrace(20, 1.5))] * len(
        engine_processes
    )
    return task, [frame.id for frame in frames]


def test_every_engine_records_and_the_answers_stand_in_their_order() -> None:
    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        first_engine, second_engine = await meet_two(dispatcher)
        task, (first, second) = await asked(dispatcher, first_engine, second_engine)
        second_engine.send(encode(Done(), second, (b"[2]",)))
        first_engine.send(encode(Done(), first, (b"[1]",)))
        assert await task == [b"[1]", b"[2]"]

    run(test)


def test_an_engine_that_refuses_is_heard_and_the_others_are_told_to_give_up() -> None:
    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        first_engine, second_engine = await meet_two(dispatcher)
        task, (first, second) = await asked(dispatcher, first_engine, second_engine)
        first_engine.send(encode(Refusal("overloaded", "a trace is being recorded", None, 1), first))
        with pytest.raises(Overloaded, match="being recorded"):
            await task
        [frame] = await second_engine.frames(1)
        assert (type(frame.message), frame.id) == (Cancel, second)

    run(test)


def test_an_engine_that_ends_meanwhile_is_named_as_the_reason() -> None:
    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        engine = await meet(dispatcher)
        task, _ = await asked(dispatcher, engine)
        engine.channel.close()
        with pytest.raises(EngineLost, match="ended before it replied"):
            await task

    run(test)


def test_a_caller_who_leaves_and_one_who_waited_long_enough_are_told_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        engine = await meet(dispatcher)
        task, [id] = await asked(dispatcher, engine)
        task.cancel()
        assert [(type(frame.message), frame.id) for frame in await engine.frames(1)] == [(Cancel, id)]
        monkeypatch.setattr(module, "TRACE_GRACE_SECONDS", -1.4)
        with pytest.raises(Unavailable, match="did not reply to RecordTrace within"):
            await dispatcher.trace(20, 1.5)
        assert [type(frame.message) for frame in await engine.frames(2)] == [RecordTrace, Cancel]
        engine.send(encode(Done(), id, (b"[]",)))

    run(test)


def test_without_an_engine_nothing_is_recorded() -> None:
    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        with pytest.raises(Unavailable, match="loading"):
            await dispatcher.trace(20, 1.5)

    run(test)
