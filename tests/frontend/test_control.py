"""The control channel of a frontend, with a supervisor that the test plays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from service.access.caller import LOCAL
from service.errors import UnknownModel
from service.frontend import control as control_module
from service.frontend.catalog import Catalog
from service.frontend.control import FORGET_SECONDS, Control
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.inference import Frontend, track_request
from service.frontend.origin import NO_ORIGIN, RequestIdentity
from service.ipc.channel import Channel, encode, pair, send_now
from service.ipc.messages import (
    Api,
    CollectMetrics,
    Done,
    ForgetModel,
    Manifest,
    MetricsCollected,
    ModelKey,
    ScrapeMetrics,
    ServeModels,
)
from service.log import Log
from service.metrics import UNLOADED, Metrics, Snapshot, stale
from service.settings import Settings
from tests.frontend.dispatch.test_dispatcher import meet, request
from tests.frontend.dispatch.test_dispatcher import run as run_dispatcher


def test_overlapping_scrapes_get_their_own_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "SCRAPE_SECONDS", 60.0)

    async def test(control: Control, supervisor: Channel) -> None:
        first, second = asyncio.ensure_future(control.scrape()), asyncio.ensure_future(control.scrape())
        asked: list[int] = []
        while len(asked) < 2:
            await asyncio.sleep(0.001)
            asked += [frame.id for frame in supervisor.receive() if isinstance(frame.message, ScrapeMetrics)]
        for id, scrape in zip(asked, (first, second), strict=True):
            supervisor.send(encode(MetricsCollected({"asked": [((), [float(id)])]}), id))
            supervisor.flush()
            assert await scrape == {"asked": [((), [float(id)])]}

    run(test)


def test_metrics_reply_has_the_id_of_the_call() -> None:
    async def test(control: Control, supervisor: Channel) -> None:
        supervisor.send(encode(CollectMetrics(), 7))
        supervisor.flush()
        while not (frames := supervisor.receive()):
            await asyncio.sleep(0.001)
        assert [(type(frame.message), frame.id) for frame in frames] == [(MetricsCollected, 7)]

    run(test)


def test_late_supervisor_gives_the_last_known_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "SCRAPE_SECONDS", 60.0)

    async def test(control: Control, supervisor: Channel) -> None:
        scrape = asyncio.ensure_future(control.scrape())
        while not (frames := supervisor.receive()):
            await asyncio.sleep(0.001)
        known: Snapshot = {"known": [((), [1.0])], "seqserve_processes": [(("engine",), [1.0]), (("frontend",), [2.0])]}
        supervisor.send(encode(MetricsCollected(known), frames[0].id))
        supervisor.flush()
        assert await scrape == known
        monkeypatch.setattr(control_module, "SCRAPE_SECONDS", 0.01)
        late = await control.scrape()
        assert late == known | {"seqserve_stale_processes": [((), [4.0])]}, "nothing replies to the second call"

    run(test)


def test_metrics_of_the_frontend_stand_in_before_the_first_reply() -> None:
    async def test(control: Control, supervisor: Channel) -> None:
        assert await control.scrape() == stale(Metrics().snapshot())

    run(test)


def test_change_of_the_models_is_announced() -> None:
    async def test(control: Control, supervisor: Channel) -> None:
        supervisor.send(encode(ServeModels(Manifest([], {})), 7))
        supervisor.flush()
        while not (frames := supervisor.receive()):
            await asyncio.sleep(0.001)
        assert [(type(frame.message), frame.id) for frame in frames] == [(Done, 7)]
        assert changes == ["changed"]

    changes: list[str] = []
    run(test, lambda: changes.append("changed"))


def test_huge_model_name_never_reaches_the_supervisor() -> None:
    async def test(control: Control, supervisor: Channel) -> None:
        for change in (control.load, control.unload):
            with pytest.raises(UnknownModel) as refused:
                await change("n" * (15 << 20))
            assert len(refused.value.message) < 500
        await asyncio.sleep(0)
        assert not supervisor.receive()

    run(test)


def test_version_is_forgotten_after_its_last_reply_is_counted() -> None:
    """Otherwise the count of the reply would restore the removed series, for good."""
    key = ModelKey("words", "1")

    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        engine = await meet(dispatcher)
        near, far = pair()
        control, supervisor = Control(Channel(far)), Channel(near)
        frontend = Frontend(Settings(), Catalog([], {}), dispatcher, metrics, Log("frontend"), control)
        control.listen(frontend)

        async def answer() -> None:
            identity = RequestIdentity(NO_ORIGIN, frontend.request_ids)
            with track_request(frontend, time.monotonic(), LOCAL, Api.INFER, identity) as tracked:
                tracked.labels = key.labels
                await dispatcher.submit(request(), b"")

        answering = asyncio.ensure_future(answer())
        [frame] = await engine.frames(1)
        send_now(supervisor, ForgetModel(key))
        await asyncio.sleep(2 * FORGET_SECONDS)
        engine.answer(frame, backlog=0.0)
        await answering
        assert metrics.requests.values
        while metrics.requests.values.keys() - {(*UNLOADED, "ok")}:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().remove_reader(far.fileno())
        far.close()
        supervisor.close()

    run_dispatcher(test)


def run(test: Callable[[Control, Channel], Awaitable[None]], on_change: Callable[[], None] = lambda: None) -> None:
    async def within_a_loop() -> None:
        near, far = pair()
        control, supervisor = Control(Channel(far), on_change=on_change), Channel(near)
        metrics = Metrics()
        control.listen(
            Frontend(Settings(), Catalog([], {}), Dispatcher(metrics, 1_000, control.ready), metrics, Log("frontend"), control)
        )
        try:
            await asyncio.wait_for(test(control, supervisor), 10)
        finally:
            asyncio.get_running_loop().remove_reader(far.fileno())
            far.close()
            supervisor.close()

    asyncio.run(within_a_loop())
