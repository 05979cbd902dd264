"""What the supervisor decides about its processes: restarts, hangs, readiness and versions with which engines end, with fake processes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.errors import InvalidModel, StartError
from service.ipc.channel import Frame
from service.ipc.heartbeat import IDLE_SECONDS, PATIENCE_SECONDS
from service.ipc.messages.control import Drain, NotLoaded, Ready
from service.ipc.messages.inference import TrialBegan, TrialEnded
from service.ipc.messages.models import ModelKey, ModelVersion
from service.ipc.quota_counts import QuotaCounts
from service.log import Log
from service.settings import Settings
from service.supervisor import supervisor
from service.supervisor.process import Child
from service.supervisor.supervisor import FORGIVEN_SECONDS, LONGEST_DELAY_SECONDS, STARTS_ALLOWED, Supervisor
from service.supervisor.trials import MAX_ENDS, Trials
from tests.supervisor.fakes import FakeChild


class Clock:
    """The monotonic time. `wait` ends a sleep after `late` more seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.late = 0.0

    async def wait(self, seconds: float) -> None:
        self.now += seconds + self.late
        await sleep(0)


sleep = asyncio.sleep


class Started:
    """A supervisor with one engine and one frontend, neither ready yet."""

    def __init__(self, root: Path) -> None:
        self.announced: list[Any] = []
        settings = Settings(models=root, device="cpu", frontends=1, port=0, grpc_port="off", strict=False)
        self.supervisor: Any = Supervisor(settings, Log("test"), self.announced.append)
        self.engine, self.frontend = FakeChild("engine-0", ready=False), FakeChild("frontend-0", ready=False)
        children: dict[str, Any] = self.supervisor._children
        children |= {"engine-0": self.engine, "frontend-0": self.frontend}
        [self.version] = self.supervisor.manifest.model_versions

    def tell(self, child: FakeChild, message: Any) -> None:
        self.supervisor._handle_message(cast(Child, child), Frame(message, 0, b""))

    def reasons(self) -> list[str]:
        return [entry.reason for entry in self.supervisor.manifest.unavailable]

    def restarts(self) -> dict[tuple[str, ...], float]:
        rows = self.supervisor._metrics.snapshot().get("seqserve_process_restarts", [])
        return {labels: values[0] for labels, values in rows if values[0]}

    def metric(self, name: str) -> float:
        [(_, [value])] = self.supervisor._metrics.snapshot()[f"seqserve_{name}"]
        return float(value)

    def close(self) -> None:
        self.supervisor._sockets.close()
        for journal in self.supervisor._journals.values():
            journal.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock  # type: ignore[return-value]


def run(root: Path, scenario: Callable[[Started], Awaitable[None]]) -> None:
    async def within() -> None:
        started = Started(root)
        try:
            async with asyncio.timeout(60):
                await scenario(started)
        finally:
            started.close()

    asyncio.run(within())


async def settle(at: Started) -> None:
    """Return when the processes have learned of the versions that are left out."""
    for _ in range(20):
        await sleep(0)
    while at.supervisor._leaving_out:
        await sleep(0)


def test_service_is_announced_when_all_are_ready_and_ready_while_one_of_each_role_is(root: Path) -> None:
    async def scenario(at: Started) -> None:
        at.tell(at.engine, Ready())
        assert not at.announced and at.metric("ready") == 0
        at.tell(at.frontend, Ready())
        [addresses] = at.announced
        assert addresses.http and at.metric("ready") == 1
        await at.supervisor._reap(at.engine)
        assert at.metric("ready") == 0 and at.restarts() == {("engine", "ended"): 1}
        at.supervisor._children["engine-0"] = successor = FakeChild("engine-0")
        at.tell(successor, Ready())
        assert at.metric("ready") == 1 and len(at.announced) == 1
        at.supervisor._draining = True
        at.supervisor._update_ready()
        assert at.metric("ready") == 0

    run(root, scenario)


def test_restarts_wait_longer_each_time_and_are_forgiven(root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(at: Started) -> None:
        monkeypatch.setattr(random, "uniform", lambda _, high: high)
        at.supervisor._announced = True
        delays = [at.supervisor._restart_delay("engine-0") for _ in range(8)]
        assert delays == [0, 0.4, 0.8, 1.6, 3.2, *[LONGEST_DELAY_SECONDS] * 3]
        assert at.supervisor._restart_delay("frontend-0") == 0
        clock.now += FORGIVEN_SECONDS + 1
        assert at.supervisor._restart_delay("engine-0") == 0

    run(root, scenario)


def test_process_that_never_becomes_ready_ends_the_start(root: Path, clock: Clock) -> None:
    async def scenario(at: Started) -> None:
        at.engine.on_trial.add(at.version.key)
        for _ in range(STARTS_ALLOWED - 1):
            at.supervisor._restart_delay("engine-0", at.engine)
        with pytest.raises(StartError, match=f"ended {STARTS_ALLOWED} times .* tried words version 1: see its log"):
            at.supervisor._restart_delay("engine-0", at.engine)
        at.engine.survived.add(ModelVersion("other", "1", 2, "", "").key)
        assert at.supervisor._restart_delay("engine-0", at.engine) > 0, "it can start without the version"
        at.supervisor._settings = at.supervisor._settings.model_copy(update={"strict": True})
        with pytest.raises(StartError, match=f"ended {STARTS_ALLOWED + 2} times"):
            at.supervisor._restart_delay("engine-0", at.engine)
        at.engine.failure = "no device"
        with pytest.raises(StartError, match="no device"):
            await at.supervisor._reap(at.engine)

    run(root, scenario)


def test_hung_process_is_killed_and_a_pause_of_the_whole_machine_kills_none(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(at: Started) -> None:
        monkeypatch.setattr(asyncio, "sleep", clock.wait)
        watching = asyncio.ensure_future(at.supervisor._watch_heartbeats())
        await settle(at)
        assert not at.engine.killed
        clock.late = PATIENCE_SECONDS
        await settle(at)
        at.engine.hung = True
        await settle(at)
        assert not at.engine.killed, "this process did not run either"
        clock.late, paused = 0.0, clock.now
        while not at.engine.killed:
            await sleep(0)
        assert at.engine.killed == "hung" and not at.frontend.killed
        assert clock.now >= paused + PATIENCE_SECONDS - 2 * IDLE_SECONDS
        watching.cancel()

    run(root, scenario)


def test_exit_is_noticed_while_another_process_holds_the_channel(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(at: Started) -> None:
        monkeypatch.setattr(supervisor, "IDLE_SECONDS", 0.001)
        watching = asyncio.ensure_future(at.supervisor._watch_heartbeats())
        at.frontend.exited = True
        await at.frontend.ended.wait()
        assert not at.engine.ended.is_set() and not at.frontend.killed
        watching.cancel()

    run(root, scenario)


def test_quotas_of_a_frontend_that_ended_are_free(root: Path) -> None:
    async def scenario(at: Started) -> None:
        counts = QuotaCounts.open(os.dup(at.supervisor._quota_counts.descriptor), 0)
        use = counts.of_key("reader")
        use.begin(3, 0, now=1.0)
        await at.supervisor._reap(at.frontend)
        assert use.total(1.0).in_flight == 0
        os.close(counts.descriptor)

    run(root, scenario)


def test_draining_frontends_are_ended_and_the_other_processes_restarted(root: Path) -> None:
    async def scenario(at: Started) -> None:
        at.supervisor._announced = True
        at.supervisor._interrupted.set()
        terminated = asyncio.Event()
        at.frontend.process.terminate = terminated.set
        await at.supervisor._drain({"frontend-0": asyncio.ensure_future(terminated.wait())})
        assert at.frontend.took(Drain) and terminated.is_set() and not at.engine.calls
        closed = [at.supervisor._is_closed(name) for name in ("frontend-0", "tracer-0", "engine-0", "store-0")]
        assert closed == [True, True, False, False]

    run(root, scenario)


def test_version_that_one_process_lacks_is_left_out_at_the_start(root: Path) -> None:
    """Later, it is served while any process of the role has it."""

    async def scenario(at: Started) -> None:
        missing = NotLoaded(at.version.key, InvalidModel.code, "damaged")
        other = at.supervisor._children["engine-1"] = FakeChild("engine-1")
        at.supervisor._announced = True
        at.tell(at.engine, missing)
        await settle(at)
        assert at.supervisor.manifest.model_versions == [at.version]
        at.tell(other, missing)
        await settle(at)
        assert at.supervisor.manifest.model_versions == [] and at.reasons() == ["damaged"]

    async def at_the_start(at: Started) -> None:
        at.tell(at.engine, NotLoaded(at.version.key, InvalidModel.code, "damaged"))
        await settle(at)
        assert at.engine.failure == "damaged", "no model is left"

    run(root, scenario)
    run(root, at_the_start)


def test_version_with_which_engines_end_becomes_unavailable(root: Path) -> None:
    """A version that has run in another engine is kept."""

    async def scenario(at: Started) -> None:
        at.supervisor._announced = True
        for _ in range(MAX_ENDS):
            assert at.supervisor.manifest.model_versions == [at.version]
            engine = at.supervisor._children["engine-0"] = FakeChild("engine-0")
            at.tell(engine, TrialBegan(ModelVersion("other", "1", 2, "", "").key))
            at.tell(engine, TrialEnded(ModelVersion("other", "1", 2, "", "").key, ran=False))
            at.tell(engine, TrialBegan(at.version.key))
            await at.supervisor._reap(engine)
            await settle(at)
        assert at.supervisor.manifest.model_versions == []
        assert at.reasons()[0].startswith(f"{MAX_ENDS} engines in a row ended")

    async def ran_elsewhere(at: Started) -> None:
        at.supervisor._announced = True
        other = at.supervisor._children["engine-1"] = FakeChild("engine-1")
        at.tell(other, TrialBegan(at.version.key))
        at.tell(other, TrialEnded(at.version.key, ran=True))
        for _ in range(2 * MAX_ENDS):
            engine = at.supervisor._children["engine-0"] = FakeChild("engine-0")
            engine.survived.add(ModelVersion("other", "1", 2, "", "").key)
            at.tell(engine, TrialBegan(at.version.key))
            await at.supervisor._reap(engine)
        await settle(at)
        assert at.supervisor.manifest.model_versions == [at.version]

    run(root, scenario)
    run(root, ran_elsewhere)


WORDS, OTHER = ModelVersion("words", "1", 1, "", ""), ModelVersion("other", "1", 2, "", "")


def end(
    trials: Trials, key: ModelKey, *, survived: frozenset[ModelKey] = frozenset({OTHER.key}), elsewhere: bool = False
) -> str:
    """Count an end, and return the reason with which the version is refused, empty if it is not."""
    error = trials.count_end(key, survived=survived, ran_elsewhere=elsewhere)
    return "" if error is None else error.message


def test_version_is_refused_after_a_fixed_number_of_ends() -> None:
    trials = Trials()
    reasons = [end(trials, WORDS.key) for _ in range(MAX_ENDS)]
    assert reasons == [""] * (MAX_ENDS - 1) + [
        f"{MAX_ENDS} engines in a row ended while they loaded this version or ran its first batch"
    ]
    assert trials.to_load([WORDS, OTHER]) == [OTHER]
    assert not end(trials, WORDS.key), "it is refused once"
    trials.keep({OTHER.key})
    assert trials.to_load([WORDS, OTHER]) == [WORDS, OTHER], "a version that is forgotten can be loaded again"
    end(trials, WORDS.key)
    assert trials.to_load([WORDS, OTHER]) == [OTHER, WORDS], "versions with which engines ended are loaded last"


def test_run_in_between_begins_the_count_again() -> None:
    trials = Trials()
    for _ in range(3):
        assert not any(end(trials, WORDS.key) for _ in range(MAX_ENDS - 1))
        trials.count_pass(WORDS.key)
    assert not trials.has_ended_engines(WORDS.key)


def test_version_is_kept_while_the_device_may_be_the_cause() -> None:
    """It is refused once an engine ends with it after loading another version, unless it has run in another engine."""
    trials = Trials()
    assert not any(end(trials, WORDS.key, elsewhere=True) for _ in range(2 * MAX_ENDS))
    assert not any(end(trials, WORDS.key, survived=frozenset({WORDS.key})) for _ in range(2 * MAX_ENDS))
    assert end(trials, WORDS.key)
