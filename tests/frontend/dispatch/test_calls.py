"""Chunks and calls of a session go to the engine that holds it, and traces to every engine."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from service.errors import DeadlineExceeded, EngineLost, Overloaded, SessionLost, Unavailable, UnknownSession
from service.frontend.dispatch import dispatcher as module
from service.frontend.dispatch.dispatcher import Dispatcher
from service.ipc.channel import encode
from service.ipc.messages.inference import Cancel, RecordTrace, Request
from service.ipc.messages.message import Done, Refusal
from service.ipc.messages.sessions import EndSession, ExportSession, ImportSession
from service.ipc.session_file import SessionFile, StateOrigin
from service.ipc.session_placement import engine_of_session
from service.metrics import Metrics
from tests.frontend.dispatch.test_dispatcher import (
    EngineProcess,
    in_loop,
    lose,
    meet,
    meet_two,
    request,
    run,
    send,
    submit,
    tails,
)

NAMES = [str(number) for number in range(20)]
ORIGIN = StateOrigin("words", "1", "", 1)
FIRST, SECOND = ([name for name in NAMES if engine_of_session(name, 2) == place] for place in (0, 1))


def a_file(size: int) -> SessionFile:
    """Return an exported file whose tensors take `size` bytes."""
    return SessionFile(ORIGIN, {}, memoryview(bytes(size)))


@in_loop(places=2)
async def test_chunk_goes_to_its_sessions_engine_however_busy(dispatcher: Dispatcher, metrics: Metrics) -> None:
    engine_processes = await meet_two(dispatcher)
    for name in NAMES * 2:
        await send(dispatcher, name.encode(), session=name)
    for engine, names in zip(engine_processes, (FIRST, SECOND), strict=True):
        assert [bytes(frame.tail).decode() for frame in await engine.frames(2 * len(names))] == names * 2


@in_loop(places=2)
async def test_session_is_refused_only_while_its_engine_restarts(dispatcher: Dispatcher, metrics: Metrics) -> None:
    with pytest.raises(Unavailable, match="loading"):
        await (await send(dispatcher, session=FIRST[0]))
    first_engine, second_engine = await meet_two(dispatcher)
    await lose(dispatcher, first_engine)
    with pytest.raises(EngineLost, match="of this session") as raised:
        await (await send(dispatcher, session=FIRST[0]))
    assert raised.value.retry_after == 1
    with pytest.raises(EngineLost, match="of this session"):
        await dispatcher.end_session(FIRST[0])
    await send(dispatcher, b"unharmed", session=SECOND[0])
    await send(dispatcher, b"stateless")
    assert await tails(second_engine, 2) == [b"unharmed", b"stateless"]
    await lose(dispatcher, second_engine)
    with pytest.raises(EngineLost, match="no engine is running"):
        await (await send(dispatcher, session=FIRST[0]))


@in_loop(places=2)
async def test_chunk_of_a_lost_engine_waits_for_its_successor(dispatcher: Dispatcher, metrics: Metrics) -> None:
    first_engine, second_engine = await meet_two(dispatcher)
    task = await send(dispatcher, b"lost", session=FIRST[0])
    [sent] = await first_engine.frames(1)
    await lose(dispatcher, first_engine)
    second_engine.channel.receive()
    await lose(dispatcher, second_engine)
    second_engine = await meet(dispatcher, 1)
    await send(dispatcher, b"of another", session=SECOND[0])
    assert await tails(second_engine, 1) == [b"of another"]
    successor = await meet(dispatcher, 0)
    [again] = await successor.frames(1)
    assert (again.message, again.id, again.tail) == (msgspec.structs.replace(sent.message, resubmitted=True), sent.id, b"lost")
    successor.send(encode(Refusal("session_lost", "its engine ended", "session"), again.id))
    with pytest.raises(SessionLost, match="its engine ended"):
        await task
    assert not metrics.rerun.values, "it was not run"


@in_loop(places=2)
async def test_late_chunk_reports_the_lost_engine(dispatcher: Dispatcher, metrics: Metrics) -> None:
    first_engine, _ = await meet_two(dispatcher)
    task = await send(dispatcher, session=FIRST[0], seconds=1.0)
    await first_engine.frames(1)
    first_engine.channel.close()
    with pytest.raises(EngineLost, match="before the deadline"):
        await task
    successor = await meet(dispatcher, 0)
    with pytest.raises(DeadlineExceeded):
        await (await send(dispatcher, b"another", session=FIRST[0], seconds=0.05))
    frames = await successor.frames(2)
    assert [(type(frame.message), frame.tail) for frame in frames] == [(Request, b"another"), (Cancel, b"")]


@in_loop(places=2)
async def test_session_calls_go_to_the_sessions_engine(dispatcher: Dispatcher, metrics: Metrics) -> None:
    first_engine, second_engine = await meet_two(dispatcher)
    export = asyncio.ensure_future(dispatcher.export_session(FIRST[0]))
    adopt = asyncio.ensure_future(dispatcher.import_session(SECOND[0], a_file(5)))
    [frame] = await first_engine.frames(1)
    assert (frame.message, frame.tail) == (ExportSession(FIRST[0]), b"")
    first_engine.send(encode(Done(), frame.id, (b"its state",)))
    assert await export == b"its state"
    [frame] = await second_engine.frames(1)
    assert (frame.message, frame.tail) == (ImportSession(SECOND[0], ORIGIN, {}), bytes(5))
    second_engine.send(encode(Done(), frame.id))
    await adopt
    end = asyncio.ensure_future(dispatcher.end_session(FIRST[0]))
    [frame] = await first_engine.frames(1)
    assert frame.message == EndSession(FIRST[0])
    first_engine.send(encode(Refusal("unknown_session", "it is not open", "session"), frame.id))
    with pytest.raises(UnknownSession, match="not open"):
        await end


@in_loop()
async def test_calls_to_a_lost_engine_fail(dispatcher: Dispatcher, metrics: Metrics) -> None:
    with pytest.raises(Unavailable, match="loading"):
        await dispatcher.trace(20, 1.5)
    engine = await meet(dispatcher)
    asked = [
        asyncio.ensure_future(one)
        for one in (
            *(dispatcher.export_session("a"), dispatcher.import_session("b", a_file(5)), dispatcher.end_session("c")),
            dispatcher.trace(20, 1.5),
        )
    ]
    await engine.frames(4)
    engine.channel.close()
    for one in asked:
        with pytest.raises(EngineLost, match="before it replied"):
            await one
    successor = await meet(dispatcher)
    await send(dispatcher, session="d")
    assert [isinstance(frame.message, Request) for frame in await successor.frames(1)] == [True]


@in_loop()
async def test_session_states_count_towards_channel_bytes(dispatcher: Dispatcher, metrics: Metrics) -> None:
    engine = await meet(dispatcher)
    first = asyncio.ensure_future(dispatcher.import_session("a", a_file(6_000)))
    [frame] = await engine.frames(1)
    for refused in (dispatcher.import_session("b", a_file(6_000)), submit(dispatcher, request(), bytes(6_000))):
        with pytest.raises(Overloaded, match="the limit of the channel is 10000"):
            await refused
    engine.send(encode(Done(), frame.id))
    await first
    await send(dispatcher, bytes(4_000))
    second = asyncio.ensure_future(dispatcher.import_session("b", a_file(4_000)))
    await engine.frames(2)
    with pytest.raises(Overloaded, match=r"8\d\d\d bytes of requests are unanswered"):
        await submit(dispatcher, request(1.0), bytes(4_000))
    second.cancel()


async def start_trace(dispatcher: Dispatcher, *engine_processes: EngineProcess) -> tuple[asyncio.Task[list[bytes]], list[int]]:
    """Start a trace; return its task and the id of the call to each engine."""
    task = asyncio.ensure_future(dispatcher.trace(20, 1.5))
    frames = [frame for engine in engine_processes for frame in await engine.frames(1)]
    assert [frame.message for frame in frames] == [RecordTrace(20, 1.5)] * len(engine_processes)
    return task, [frame.id for frame in frames]


@in_loop()
async def test_traces_of_all_engines_come_in_order_or_not_at_all(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """The refusal of one engine cancels the call to the other."""
    first_engine, second_engine = await meet_two(dispatcher)
    task, (first, second) = await start_trace(dispatcher, first_engine, second_engine)
    second_engine.send(encode(Done(), second, (b"[2]",)))
    first_engine.send(encode(Done(), first, (b"[1]",)))
    assert await task == [b"[1]", b"[2]"]
    task, (first, second) = await start_trace(dispatcher, first_engine, second_engine)
    first_engine.send(encode(Refusal("overloaded", "a trace is being recorded", None, 1), first))
    with pytest.raises(Overloaded, match="being recorded"):
        await task
    [frame] = await second_engine.frames(1)
    assert (type(frame.message), frame.id) == (Cancel, second)


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
