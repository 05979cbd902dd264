"""Requests of a version that no engine has run yet. It may end every engine, and the requests of other versions are answered."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from service.errors import EngineLost
from service.frontend.dispatch.dispatcher import HOLD_SECONDS, MAX_ATTEMPTS, Dispatcher
from service.ipc.channel import encode
from service.ipc.messages.inference import Release, TrialBegan, TrialEnded
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics
from tests.clock import Clock
from tests.frontend.dispatch.test_dispatcher import EngineProcess, in_loop, lose, meet, meet_two, run, send, tails

UNTRIED = ModelKey("untried", "1")
NEW: dict[str, Any] = {"model": UNTRIED.name, "version": UNTRIED.version}


async def end_in_trial(dispatcher: Dispatcher, engine: EngineProcess, *keys: ModelKey) -> None:
    """End an engine while it tries versions, and wait until the frontend has noticed."""
    engine.send(b"".join(encode(TrialBegan(key)) for key in keys))
    await lose(dispatcher, engine)


@in_loop(places=2)
async def test_untried_version_goes_to_one_engine_until_it_has_run(dispatcher: Dispatcher, metrics: Metrics) -> None:
    first, second = await meet_two(dispatcher)
    for _ in range(4):
        await send(dispatcher, b"untried", **NEW)
    assert len(await tails(first, 4)) == 4
    second.send(encode(TrialEnded(UNTRIED, ran=True)))
    await asyncio.sleep(0.01)
    for _ in range(4):
        await send(dispatcher, b"untried", **NEW)
    assert len(await tails(first, 2)) == len(await tails(second, 2)) == 2, "equally busy engines alternate"


@in_loop()
async def test_end_counts_only_against_the_version_on_trial(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """A request of another version is answered after any number of such ends."""
    engine = await meet(dispatcher)
    beside, deadly = await send(dispatcher, b"beside", steps=2), await send(dispatcher, b"untried", **NEW)
    for _ in range(MAX_ATTEMPTS):
        assert b"untried" in await tails(engine, len(dispatcher._connections[0].pending))
        await end_in_trial(dispatcher, engine, UNTRIED)
        engine = await meet(dispatcher)
    with pytest.raises(EngineLost, match="not sent to a third"):
        await deadly
    frames = await engine.frames(1)
    assert [bytes(frame.tail) for frame in frames] == [b"beside"]
    engine.answer(*frames, backlog=0.0)
    await beside


async def meet_two_and_lose_the_first(dispatcher: Dispatcher) -> tuple[EngineProcess, asyncio.Task[Any]]:
    """Send an untried version, with which the first engine ends. Return the second engine, and the request that waits."""
    first, second = await meet_two(dispatcher)
    waits = await send(dispatcher, b"untried", **NEW)
    await tails(first, 1)
    await end_in_trial(dispatcher, first, UNTRIED)
    return second, waits


@in_loop(places=2)
async def test_remaining_engine_does_not_get_the_version_that_ended_the_other(dispatcher: Dispatcher, metrics: Metrics) -> None:
    second, waits = await meet_two_and_lose_the_first(dispatcher)
    with pytest.raises(EngineLost, match="an engine ended with untried version 1") as raised:
        await (await send(dispatcher, b"untried", **NEW))
    assert raised.value.retry_after == 1
    await send(dispatcher, b"other")
    assert await tails(second, 1) == [b"other"]
    first = await meet(dispatcher, 0)
    assert await tails(first, 1) == [b"untried"]
    first.send(encode(TrialEnded(UNTRIED, ran=True)))
    waits.cancel()


def test_wait_for_the_successor_of_an_engine_ends() -> None:
    """An engine that never restarts does not keep a version from the other engines."""

    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        first, second = await meet_two(dispatcher)
        await end_in_trial(dispatcher, first, UNTRIED)
        clock.now += HOLD_SECONDS
        await send(dispatcher, b"untried", **NEW)
        assert await tails(second, 1) == [b"untried"]

    clock = Clock(time.monotonic())
    run(test, places=2, clock=clock)


@in_loop(places=2)
async def test_waiting_requests_of_a_retired_version_are_refused(dispatcher: Dispatcher, metrics: Metrics) -> None:
    second, waits = await meet_two_and_lose_the_first(dispatcher)
    dispatcher.release(UNTRIED)
    with pytest.raises(EngineLost, match="not served any more"):
        await waits
    assert [type(frame.message) for frame in await second.frames(1)] == [Release]


@in_loop(places=2)
async def test_version_that_runs_after_all_is_sent_to_every_engine(dispatcher: Dispatcher, metrics: Metrics) -> None:
    """An engine that ended for another reason during the trial does not keep the version from the other engines."""
    second, waits = await meet_two_and_lose_the_first(dispatcher)
    second.send(encode(TrialEnded(UNTRIED, ran=True)))
    assert await tails(second, 1) == [b"untried"]
    waits.cancel()
