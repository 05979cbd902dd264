"""Traces from the dispatcher, with engines that the test plays."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import EngineLost, Overloaded, Unavailable
from service.frontend.dispatch import dispatcher as module
from service.frontend.dispatch.dispatcher import Dispatcher
from service.ipc.channel import encode
from service.ipc.messages import Cancel, Done, RecordTrace, Refusal
from service.metrics import Metrics
from tests.frontend.dispatch.test_dispatcher import EngineProcess, in_loop, meet, meet_two, run


async def start_trace(dispatcher: Dispatcher, *engine_processes: EngineProcess) -> tuple[asyncio.Task[list[bytes]], list[int]]:
    """Start a trace; return its task and the id of the call to each engine."""
    task = asyncio.ensure_future(dispatcher.trace(20, 1.5))
    frames = [frame for engine in engine_processes for frame in await engine.frames(1)]
    assert [frame.message for frame in frames] == [RecordTrace(20, 1.5)] * len(engine_processes)
    return task, [frame.id for frame in frames]


@in_loop()
async def test_traces_come_in_the_order_of_the_engines(dispatcher: Dispatcher, metrics: Metrics) -> None:
    first_engine, second_engine = await meet_two(dispatcher)
    task, (first, second) = await start_trace(dispatcher, first_engine, second_engine)
    second_engine.send(encode(Done(), second, (b"[2]",)))
    first_engine.send(encode(Done(), first, (b"[1]",)))
    assert await task == [b"[1]", b"[2]"]


@in_loop()
async def test_refusal_of_one_engine_cancels_the_others(dispatcher: Dispatcher, metrics: Metrics) -> None:
    first_engine, second_engine = await meet_two(dispatcher)
    task, (first, second) = await start_trace(dispatcher, first_engine, second_engine)
    first_engine.send(encode(Refusal("overloaded", "a trace is being recorded", None, 1), first))
    with pytest.raises(Overloaded, match="being recorded"):
        await task
    [frame] = await second_engine.frames(1)
    assert (type(frame.message), frame.id) == (Cancel, second)


@in_loop()
async def test_trace_fails_without_an_engine_and_when_it_ends(dispatcher: Dispatcher, metrics: Metrics) -> None:
    with pytest.raises(Unavailable, match="loading"):
        await dispatcher.trace(20, 1.5)
    engine = await meet(dispatcher)
    task, _ = await start_trace(dispatcher, engine)
    engine.channel.close()
    with pytest.raises(EngineLost, match="ended before it replied"):
        await task


def test_disconnect_and_timeout_cancel_the_trace_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        engine = await meet(dispatcher)
        task, [id] = await start_trace(dispatcher, engine)
        task.cancel()
        assert [(type(frame.message), frame.id) for frame in await engine.frames(1)] == [(Cancel, id)]
        monkeypatch.setattr(module, "TRACE_GRACE_SECONDS", -1.4)
        with pytest.raises(Unavailable, match="did not reply to RecordTrace within"):
            await dispatcher.trace(20, 1.5)
        assert [type(frame.message) for frame in await engine.frames(2)] == [RecordTrace, Cancel]
        engine.send(encode(Done(), id, (b"[]",)))

    run(test)
