"""The dispatcher with engines that the test plays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from service.errors import DeadlineExceeded, EngineLost, Overloaded, ServiceError, Unavailable, UnknownModel
from service.frontend.dispatch.connection import Answered, PredictedWait
from service.frontend.dispatch.dispatcher import TURN_SECONDS, Dispatcher
from service.ipc.blocks import ID
from service.ipc.channel import MAX_COPIED_BYTES, Channel, Frame, encode, pair
from service.ipc.messages.inference import (
    Answer,
    AnswerWithoutSteps,
    Backlog,
    Cancel,
    EngineStatus,
    LoadedModel,
    RefusalBlock,
    Request,
    TrialEnded,
)
from service.ipc.messages.message import Refusal
from service.ipc.messages.sessions import EndSession
from service.ipc.suspect_turns import SuspectTurns
from service.metrics import Metrics
from tests.clock import Clock
from tests.frontend.dispatch.frames import answer_frame, requests_of

SECONDS_PER_TOKEN = 1.0
LARGE = bytes(6_000)
"""Values of one request, which fill the channel."""


class EngineProcess:
    """An engine as the frontend sees it. A request costs one second per time step."""

    def __init__(self, dispatcher: Dispatcher, place: int) -> None:
        near, far = pair()
        self.channel, self.frontend = Channel(near), Channel(far)
        dispatcher.attach(self.frontend)
        backends = ["lstm: framework", f"head: of {place}"]
        model = LoadedModel("words", "1", f"cuda:{place}", backends, per_step=0.0, per_token=SECONDS_PER_TOKEN)
        self.send(encode(EngineStatus([model], place)) + encode(TrialEnded(model.key, ran=True)))

    def send(self, frame: bytes) -> None:
        self.channel.send(frame)
        self.channel.flush()

    async def frames(self, count: int) -> list[Frame]:
        """Return the next `count` frames from the frontend."""
        frames: list[Frame] = []
        while len(frames) < count:
            await asyncio.sleep(0.001)
            frames += [part for frame in self.channel.receive() for part in requests_of(frame)]
        return frames

    def answer(self, *frames: Frame, backlog: float) -> None:
        """Send answers and a backlog report in one write."""
        answers = b"".join(answer_frame(frame.id, Answer((1, 1))) for frame in frames)
        self.send(answers + encode(Backlog(backlog, self.channel.frames_received)))


def request(seconds: float = 60.0, steps: int = 2) -> Request:
    now = time.monotonic()
    return Request("words", "1", [steps], deadline=now + seconds, sent=now)


Test = Callable[[Dispatcher, Metrics], Awaitable[None]]


def in_loop(**options: Any) -> Callable[[Test], Callable[[], None]]:
    """Make a test of a coroutine with a dispatcher and its metrics. options: those of `run`."""
    return lambda test: lambda: run(test, **options)


def run(test: Test, channel_bytes: int = 10_000, places: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
    async def within_a_loop() -> None:
        metrics = Metrics()
        dispatcher = Dispatcher(metrics, channel_bytes, lambda: None, places, clock)
        try:
            await asyncio.wait_for(test(dispatcher, metrics), 300)
        finally:
            dispatcher.close()
            while met:
                met.pop().channel.close()

    met.clear()
    asyncio.run(within_a_loop())


met: list[EngineProcess] = []


async def meet(dispatcher: Dispatcher, place: int = 0) -> EngineProcess:
    engine = EngineProcess(dispatcher, place)
    met.append(engine)
    while not any(f"cuda:{place}" in model.device for model in dispatcher.models):
        await asyncio.sleep(0)
    return engine


async def meet_two(dispatcher: Dispatcher) -> tuple[EngineProcess, EngineProcess]:
    return await meet(dispatcher, 0), await meet(dispatcher, 1)


async def lose(dispatcher: Dispatcher, engine: EngineProcess) -> None:
    """End an engine, and wait until the frontend has noticed."""
    before = devices(dispatcher)
    engine.channel.close()
    while devices(dispatcher) == before:
        await asyncio.sleep(0)


def devices(dispatcher: Dispatcher) -> set[str]:
    """Return the devices of the engines that the frontend knows."""
    return {device for model in dispatcher.models for device in model.device.split(", ")}


class FutureReceiver:
    """Passes the end of a request to a future."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()

    def answered(self, answer: Answer, data: bytes | memoryview) -> None:
        if not self.future.done():
            self.future.set_result(Answered(answer, data))

    def failed(self, error: ServiceError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


async def submit(dispatcher: Dispatcher, request: Request, data: bytes) -> Answered:
    """Return the answer to a request; raises a ServiceError. Cancels the request when the awaiting task is cancelled."""
    receiver = FutureReceiver()
    pending = dispatcher.send(request, data, receiver)
    try:
        return await receiver.future
    finally:
        dispatcher.cancel(pending)


async def send(
    dispatcher: Dispatcher, tail: bytes = b"", steps: int = 1, seconds: float = 60.0, **fields: Any
) -> asyncio.Task[Answered]:
    """Start a request and let it reach its engine. fields: of the Request."""
    asked = msgspec.structs.replace(request(seconds, steps), **fields)
    task = asyncio.ensure_future(submit(dispatcher, asked, tail))
    await asyncio.sleep(0)
    return task


async def tails(engine: EngineProcess, count: int) -> list[bytes]:
    """Return the values of the next requests."""
    return [bytes(frame.tail) for frame in await engine.frames(count)]


@in_loop()
async def test_answers_match_their_requests_in_any_order(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """The requests of one tick leave in one write."""
    engine = await meet(dispatcher)
    engine.send(answer_frame(99, Answer((1, 1))))  # nothing waits for it
    values = [b"%08d" % number for number in range(20)]
    calls = [asyncio.ensure_future(submit(dispatcher, request(), tail)) for tail in values]
    for frame in reversed(await engine.frames(20)):
        engine.send(answer_frame(frame.id, Answer((1, 2), steps=[1]), frame.tail))
    assert await asyncio.gather(*calls) == [Answered(Answer((1, 2), steps=[1]), tail) for tail in values]
    assert metrics.channel_writes.values[("frontend",)] == [1]


@in_loop()
async def test_refusals_raise_the_engines_error(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """For one request, and for several at once."""
    engine = await meet(dispatcher)
    calls = [await send(dispatcher) for _ in range(4)]
    first, second, third, fourth = [frame.id for frame in await engine.frames(4)]
    engine.send(encode(Refusal("unknown_model", "no such model", "model", 3), fourth))
    with pytest.raises(UnknownModel, match="no such model") as raised:
        await calls[3]
    assert (raised.value.field, raised.value.retry_after) == ("model", 3)
    refusal = RefusalBlock(Refusal.of(Overloaded("full", retry_after=2)))
    engine.send(encode(refusal, tail=(np.array([third, 999, first], ID),)))
    engine.send(answer_frame(second, Answer((1, 1)), b"0000"))
    errors = await asyncio.gather(calls[0], calls[2], return_exceptions=True)
    assert [(type(error), str(error)) for error in errors] == [(Overloaded, "full")] * 2
    assert metrics.channel_bytes.values[("frontend",)] == [engine.frontend.bytes_sent]
    assert errors[0] is not errors[1]
    assert (await calls[1]).data == b"0000"


@in_loop()
async def test_full_channel_refuses_until_an_answer_makes_room(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """Each engine has its channel."""
    first_engine, second_engine = await meet_two(dispatcher)
    calls = [await send(dispatcher, LARGE) for _ in range(2)]
    with pytest.raises(
        Overloaded, match=r"^(\d+) bytes .*, this request has \1 and the limit of the channel is 10000"
    ) as raised:
        await submit(dispatcher, request(), LARGE)
    assert raised.value.retry_after == 1
    second_engine.answer(*await second_engine.frames(1), backlog=100.0)
    await calls[1]
    await send(dispatcher, LARGE)
    assert len(await second_engine.frames(1)) == 1, "the engine with room, however busy"
    assert len(await first_engine.frames(1)) == 1


@in_loop()
async def test_late_and_cancelled_requests_are_cancelled_at_the_engine(dispatcher: Dispatcher, metrics: Metrics) -> None:
    engine = await meet(dispatcher)
    with pytest.raises(DeadlineExceeded):
        await submit(dispatcher, request(0.05), b"")
    leaving = await send(dispatcher)
    leaving.cancel()
    frames = await engine.frames(4)
    assert [type(frame.message) for frame in frames] == [Request, Cancel, Request, Cancel]
    assert [frames[0].id, frames[2].id] == [frames[1].id, frames[3].id]


@in_loop(channel_bytes=1 << 20)
async def test_chunks_of_a_session_keep_their_order(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """Also if they differ in what a block shares, if some are large, and if a call about their session follows in the same tick."""
    engine = await meet(dispatcher)
    large = bytes(MAX_COPIED_BYTES + 8)
    sent: list[tuple[bytes, dict[str, Any]]] = [
        (b"first 1.", {}),
        (b"other 1.", {"session": "other"}),
        (b"first 2.", {"session_at": 2}),
        (b"first 3.", {"session_ends": True}),
        (b"other 2.", {"session": "other", "session_ends": True}),
        (large, {}),
        (b"first 4.", {"session_starts": True}),
    ]
    receiver = FutureReceiver()
    call = asyncio.ensure_future(
        dispatcher.end_session("first")
    )  # runs at the end of this tick, before the requests are flushed
    for data, fields in sent:
        dispatcher.send(msgspec.structs.replace(request(), **({"session": "first"} | fields)), data, receiver)
    dispatcher.send(request(), b"stateless", receiver)
    leaving = dispatcher.send(msgspec.structs.replace(request(), session="first"), b"leaving.", receiver)
    dispatcher.cancel(leaving)
    frames = await engine.frames(len(sent) + 2)
    received = [(bytes(frame.tail), frame.message) for frame in frames if isinstance(frame.message, Request)]
    for session in "first", "other":
        chunks = [data for data, fields in sent if fields.get("session", "first") == session]
        assert [data for data, message in received if message.session == session] == chunks
    by_data = dict(received)
    assert (by_data[b"first 2."].session_at, by_data[b"first 1."].session_at) == (2, None)
    assert (by_data[b"first 3."].session_ends, by_data[b"first 4."].session_starts) == (True, True)
    assert isinstance(frames[-1].message, EndSession)
    call.cancel()


@in_loop()
async def test_requests_without_an_engine_are_refused(dispatcher: Dispatcher, metrics: Metrics) -> None:
    with pytest.raises(Unavailable):
        await submit(dispatcher, request(), b"")
    await lose(dispatcher, await meet(dispatcher))
    with pytest.raises(EngineLost):
        await submit(dispatcher, request(), b"")


@in_loop()
async def test_equally_busy_engines_alternate(dispatcher: Dispatcher, metrics: Metrics) -> None:
    engine_processes = [await meet(dispatcher, place) for place in range(3)]
    for number in range(6):
        await send(dispatcher, b"%d" % number)
    assert [await tails(engine, 2) for engine in engine_processes] == [[b"0", b"3"], [b"1", b"4"], [b"2", b"5"]]


@in_loop()
async def test_request_goes_to_the_smallest_predicted_wait(dispatcher: Dispatcher, metrics: Metrics) -> None:
    first_engine, second_engine = await meet_two(dispatcher)
    await send(dispatcher, steps=10)
    for _ in range(10):
        await send(dispatcher, b"short")
    assert (await tails(first_engine, 1), await tails(second_engine, 10)) == ([b""], [b"short"] * 10)
    await send(dispatcher, b"now equal")
    assert await tails(first_engine, 1) == [b"now equal"]


def test_reported_backlog_counts_until_its_time_has_passed() -> None:
    clock = Clock(time.monotonic())

    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        first_engine, second_engine = await meet_two(dispatcher)
        calls = [await send(dispatcher), await send(dispatcher)]
        first_engine.answer(*await first_engine.frames(1), backlog=2.5)
        second_engine.answer(*await second_engine.frames(1), backlog=0.0)
        await asyncio.gather(*calls)
        for number in range(3):
            await send(dispatcher, b"%d" % number)
        assert await tails(second_engine, 3) == [b"0", b"1", b"2"]
        clock.now += 0.5
        await send(dispatcher, b"3")
        assert await tails(first_engine, 1) == [b"3"]

    run(test, clock=clock)


@in_loop()
async def test_requests_of_a_lost_engine_move_to_another(dispatcher: Dispatcher, metrics: Metrics) -> None:
    first_engine, second_engine = await meet_two(dispatcher)
    calls = [await send(dispatcher, tail) for tail in (b"first", b"second", b"third")]
    await first_engine.frames(2)
    first_engine.channel.close()
    own, again = await second_engine.frames(2)
    assert (own.tail, again.tail) == (b"second", b"first")
    assert dispatcher.ready
    second_engine.answer(again, backlog=0.0)
    (last,) = await second_engine.frames(1)
    assert last.tail == b"third", "the requests of the lost engine run one after the other"
    second_engine.answer(own, last, backlog=0.0)
    await asyncio.gather(*calls)
    assert metrics.rerun.values[()] == [2]


@in_loop()
async def test_requests_beside_one_that_ends_engines_are_answered(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """Only the deadly request is refused. It ends an engine: the first engine has all requests, the second also a new request."""
    engine = await meet(dispatcher)
    calls = {tail: await send(dispatcher, tail) for tail in (b"1", b"!", b"2", b"3")}
    await engine.frames(len(calls))
    for place in range(1, 3):
        await lose(dispatcher, engine)
        engine = await meet(dispatcher, place)
        calls[b"+"] = calls.get(b"+") or await send(dispatcher, b"+")
        while sum(call.done() for call in calls.values()) < len(calls):
            frames = await engine.frames(1)
            if any(frame.tail == b"!" for frame in frames):
                break
            engine.answer(*frames, backlog=0.0)
            await asyncio.sleep(0.001)
    with pytest.raises(EngineLost, match="not sent to a third"):
        await calls.pop(b"!")
    await asyncio.gather(*calls.values())


@in_loop()
async def test_end_of_a_suspect_makes_room_for_the_next(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """It ends by an answer, or is cancelled."""
    engine = await meet(dispatcher)
    calls = [await send(dispatcher, b"%d" % steps, steps) for steps in (4, 2, 1, 3)]
    await engine.frames(len(calls))
    await lose(dispatcher, engine)
    engine = await meet(dispatcher)
    order = []
    for end in range(4):
        (frame,) = [frame for frame in await engine.frames(2 if end == 2 else 1) if isinstance(frame.message, Request)]
        order.append(bytes(frame.tail))
        if end == 1:
            calls[1].cancel()
        else:
            engine.answer(frame, backlog=0.0)
    assert order == [b"1", b"2", b"3", b"4"], "the shortest first"
    await asyncio.gather(*calls[2:], calls[0])


class Turns(SuspectTurns):
    """The turns of one of several frontends in this process. `holders` has the frontend that holds each lock."""

    def __init__(self, holders: dict[int, Turns]) -> None:
        super().__init__(-1)
        self._holders = holders

    def _lock(self, byte: int) -> bool:
        return self._holders.setdefault(byte, self) is self

    def _unlock(self, byte: int) -> None:
        if self._holders.get(byte) is self:
            del self._holders[byte]


@in_loop()
async def test_suspects_of_two_frontends_run_one_after_the_other(_: Dispatcher, metrics: Metrics) -> None:
    """Only the deadly request is refused. Each of two frontends has a request in an engine that ends as soon as it runs this one."""
    holders = dict[int, Turns]()
    frontends = [Dispatcher(metrics, 10_000, lambda: None, turns=Turns(holders)) for _ in range(2)]
    engine = [await meet(frontend) for frontend in frontends]

    async def restart() -> list[EngineProcess]:
        """End the engine. Returns its successor, as each frontend sees it."""
        for frontend, process in zip(frontends, engine, strict=True):
            await lose(frontend, process)
        return [await meet(frontend) for frontend in frontends]

    deadly, other = [await send(frontend, tail) for frontend, tail in zip(frontends, (b"!", b"1"), strict=True)]
    engine = await restart()
    assert await tails(engine[0], 1) == [b"!"]
    await asyncio.sleep(2 * TURN_SECONDS)
    engine = await restart()
    with pytest.raises(EngineLost, match="not sent to a third"):
        await deadly
    while not other.done():
        await asyncio.sleep(0.001)
        engine[1].answer(*[part for frame in engine[1].channel.receive() for part in requests_of(frame)], backlog=0.0)
    await other
    assert not holders, "no frontend waits for its turn any more"
    for frontend in frontends:
        frontend.close()


@in_loop()
async def test_deadline_passed_without_an_engine_reports_the_loss(dispatcher: Dispatcher, metrics: Metrics) -> None:
    engine = await meet(dispatcher)
    call = await send(dispatcher, seconds=1.0)
    await engine.frames(1)
    engine.channel.close()
    with pytest.raises(EngineLost, match="before the deadline"):
        await call
    successor = await meet(dispatcher)
    await send(dispatcher, b"another")
    assert await tails(successor, 1) == [b"another"], "nothing waits for the first request"


@in_loop()
async def test_model_on_several_devices_is_listed_once(dispatcher: Dispatcher, metrics: Metrics) -> None:
    assert dispatcher.models == []
    await meet(dispatcher, 1)
    first = await meet(dispatcher, 0)
    [model] = dispatcher.models
    assert model.device == "cuda:0, cuda:1"
    assert model.backends == ["lstm: framework", "head: of 0", "head: of 1"]
    await lose(dispatcher, first)
    assert (dispatcher.models[0].device, len(dispatcher.models[0].backends)) == ("cuda:1", 2)


@in_loop()
async def test_sequences_without_steps_are_answered_by_no_engine(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """They wait for a model that is loading."""
    engine = await meet(dispatcher)
    with pytest.raises(Unavailable, match="words is still loading"):
        await submit(dispatcher, request(steps=0), b"")
    known = AnswerWithoutSteps(Answer((1, 1), steps=[0]), b"\0\0\0\0")
    engine.send(encode(EngineStatus([LoadedModel("words", "1", "cuda:1", [], without_steps=known)], 0)))
    while devices(dispatcher) != {"cuda:1"}:
        await asyncio.sleep(0)
    answered = await submit(dispatcher, request(steps=0), b"")
    assert (answered.answer.scores, answered.answer.steps, answered.data) == ((1, 1), [0], known.data)
    cancelled = await send(dispatcher, steps=0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not engine.channel.receive()


# The wait that a frontend predicts for one engine. The time is an argument.


def test_sent_requests_count_until_they_are_dropped() -> None:
    wait = PredictedWait()
    assert wait.seconds(now=5.0) == 0.0
    for request, seconds in ((1, 0.25), (2, 0.5)):
        wait.add({request: seconds})
        wait.sent([request], frame=request)
    assert wait.seconds(now=0.0) == wait.seconds(now=60.0) == 0.75
    for request, rest in ((1, 0.5), (1, 0.5), (2, 0.0)):
        wait.drop([request])
        assert wait.seconds(now=60.0) == rest
        assert len(wait._frames) == (rest > 0), "frames whose requests are all answered take no memory, also without a report"


def test_report_shrinks_with_time_to_zero_and_replaces_the_previous_one() -> None:
    wait = PredictedWait()
    wait.report(3.0, frames=0, now=100.0)
    assert [wait.seconds(now) for now in (100.0, 101.0, 103.0, 200.0)] == [3.0, 2.0, 0.0, 0.0]
    wait.report(1.0, frames=0, now=100.5)
    assert wait.seconds(now=100.5) == 1.0


@pytest.mark.parametrize("frames, seconds", [(0, 2.75), (1, 2.5), (2, 2.5), (3, 2.0), (4, 2.0)])
def test_report_includes_the_frames_it_counts(frames: int, seconds: float) -> None:
    """Frame 2 is not a request. A request that has not left is in no report."""
    wait = PredictedWait()
    wait.add({1: 0.25})
    wait.sent([1], frame=1)
    wait.add({2: 0.5})
    wait.sent([2], frame=3)
    wait.add({3: 0.125})
    wait.report(2.0, frames, now=0.0)
    assert wait.seconds(now=0.0) == seconds + 0.125
