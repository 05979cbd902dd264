"""The control channel of a frontend, with a supervisor that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from service.errors import Unavailable, UnknownModel
from service.frontend.dispatch.connection import Answered
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.run import control as control_module
from service.frontend.run.catalog import Catalog
from service.frontend.run.control import FORGET_SECONDS, Control
from service.frontend.run.frontend import Frontend
from service.ipc.channel import Channel, Frame, encode, pair, send_now
from service.ipc.messages.control import CollectMetrics, ForgetModel, MetricsCollected, ModelsListed, ServeModels
from service.ipc.messages.message import Done, Message, Refusal
from service.ipc.messages.models import IndexEntry, Manifest, ModelKey
from service.log import Log
from service.metrics import UNLOADED, Metrics, Snapshot, stale
from service.settings import Settings
from tests.frontend.dispatch.test_dispatcher import in_loop, meet, request, submit


class Supervisor:
    """The supervisor, and the channel of the frontend that it controls."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics) -> None:
        near, self._far = pair()
        self.changes = 0
        self.channel, self.control = Channel(near), Control(Channel(self._far), on_change=self._change)
        self.frontend = Frontend(Settings(), Catalog([], {}), dispatcher, metrics, Log("frontend"), self.control)
        self.control.listen(self.frontend)

    def _change(self) -> None:
        self.changes += 1

    def send(self, message: Message, id: int) -> None:
        self.channel.send(encode(message, id))
        self.channel.flush()

    async def frames(self, count: int) -> list[Frame]:
        frames: list[Frame] = []
        while len(frames) < count:
            await asyncio.sleep(0.001)
            frames += self.channel.receive()
        return frames

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._far.fileno())
        self._far.close()
        self.channel.close()


def with_supervisor(test: Callable[[Supervisor], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of a coroutine."""

    async def within(dispatcher: Dispatcher, metrics: Metrics) -> None:
        supervisor = Supervisor(dispatcher, metrics)
        try:
            await test(supervisor)
        finally:
            supervisor.close()

    return in_loop()(within)


@pytest.fixture(autouse=True)
def slow_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "SCRAPE_SECONDS", 60.0)


@with_supervisor
async def test_calls_get_their_own_replies(supervisor: Supervisor) -> None:
    """No call has a huge name of a model."""
    with pytest.raises(UnknownModel) as refused:
        await supervisor.control.load("n" * (15 << 20))
    assert len(refused.value.message) < 500
    loads = [asyncio.ensure_future(supervisor.control.load("words")) for _ in range(2)]
    first, second = await supervisor.frames(2)
    supervisor.send(Done(), second.id)
    await loads[1]
    assert not loads[0].done()
    supervisor.send(Done(), first.id)
    await loads[0]


@with_supervisor
async def test_callers_share_the_index_and_its_failure(supervisor: Supervisor) -> None:
    for reply in (ModelsListed([IndexEntry("words", "1", "READY", "")]), Refusal.of(Unavailable("later"))):
        indexes = [asyncio.ensure_future(supervisor.control.index()) for _ in range(3)]
        [frame] = await supervisor.frames(1)
        indexes[0].cancel()
        supervisor.send(reply, frame.id)
        cancelled, *others = await asyncio.gather(*indexes, return_exceptions=True)
        assert isinstance(cancelled, asyncio.CancelledError) and others[0] is others[1]


@with_supervisor
async def test_callers_share_the_scrape_that_begins_after_their_calls(supervisor: Supervisor) -> None:
    """A thousand calls at a time would otherwise keep all processes busy. The running scrape lacks what was counted since it began."""
    waiting, snapshots = [asyncio.ensure_future(supervisor.control.scrape())], list[Snapshot]()
    for _ in range(2):
        [frame] = await supervisor.frames(1)
        later = [asyncio.ensure_future(supervisor.control.scrape()) for _ in range(3)] if not snapshots else []
        await asyncio.sleep(0)
        snapshots.append({"asked": [((), [float(frame.id)])]})
        supervisor.send(MetricsCollected(snapshots[-1]), frame.id)
        assert await asyncio.gather(*waiting) == snapshots[-1:] * len(waiting)
        waiting = later


@with_supervisor
async def test_cancelled_caller_leaves_the_scrape_to_the_others(supervisor: Supervisor) -> None:
    cancelled, other = (asyncio.ensure_future(supervisor.control.scrape()) for _ in range(2))
    [frame] = await supervisor.frames(1)
    cancelled.cancel()
    supervisor.send(MetricsCollected({}), frame.id)
    assert await other == {}


@with_supervisor
async def test_late_supervisor_gives_the_last_known_metrics(supervisor: Supervisor) -> None:
    """Those of the frontend before the first reply."""
    control_module.SCRAPE_SECONDS = 0.01
    assert await supervisor.control.scrape() == stale(supervisor.frontend.metrics.snapshot())
    await supervisor.frames(2)  # the call, and its end
    control_module.SCRAPE_SECONDS = 60.0
    scrape = asyncio.ensure_future(supervisor.control.scrape())
    [frame] = await supervisor.frames(1)
    known: Snapshot = {"known": [((), [1.0])], "seqserve_processes": [(("engine",), [1.0]), (("frontend",), [2.0])]}
    supervisor.send(MetricsCollected(known), frame.id)
    assert await scrape == known
    control_module.SCRAPE_SECONDS = 0.01
    assert await supervisor.control.scrape() == known | {"seqserve_stale_processes": [((), [4.0])]}


@with_supervisor
async def test_calls_of_the_supervisor_get_replies_with_their_ids(supervisor: Supervisor) -> None:
    """A change of the models is announced."""
    supervisor.send(CollectMetrics(), 7)
    supervisor.send(ServeModels(Manifest([], {})), 8)
    assert [(type(frame.message), frame.id) for frame in await supervisor.frames(2)] == [(MetricsCollected, 7), (Done, 8)]
    assert supervisor.changes == 1


@with_supervisor
async def test_version_is_forgotten_after_its_last_reply_is_counted(supervisor: Supervisor) -> None:
    """Otherwise the count of the reply would restore the removed series, for good."""
    key, frontend = ModelKey("words", "1"), supervisor.frontend
    engine, metrics = await meet(frontend.dispatcher), frontend.metrics

    def count(answering: asyncio.Task[Answered]) -> None:
        frontend.tally.accepted += 1
        frontend.tally.answer(key.labels, [0.0], [0.0], reply=0.0, encode=0.0)
        metrics.snapshot()

    answering = asyncio.ensure_future(submit(frontend.dispatcher, request(), b""))
    answering.add_done_callback(count)
    [frame] = await engine.frames(1)
    send_now(supervisor.channel, ForgetModel(key))
    await asyncio.sleep(2 * FORGET_SECONDS)
    engine.answer(frame, backlog=0.0)
    await asyncio.wait([answering])
    assert metrics.requests.values
    while metrics.requests.values.keys() - {(*UNLOADED, "ok")}:
        await asyncio.sleep(0.01)
