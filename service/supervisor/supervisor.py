"""Starts, watches and restarts the other processes, opens the ports and aggregates metrics. Answers no inference request itself.

Shutdown is start-up reversed: report not ready, serve for the lame-duck time, close the ports, let the frontends drain, save the sessions,
end the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from service.errors import InferenceFailed, ServiceError, StartError
from service.ipc.channel import Frame
from service.ipc.connection_counts import ConnectionCounts
from service.ipc.heartbeat import IDLE_SECONDS, PATIENCE_SECONDS
from service.ipc.messages.control import (
    Drain,
    Failed,
    ListModels,
    LoadModel,
    MetricsCollected,
    ModelsListed,
    NotLoaded,
    Ready,
    ScrapeMetrics,
    UnloadModel,
)
from service.ipc.messages.inference import Cancel, TrialBegan, TrialEnded
from service.ipc.messages.message import Done, Message, Refusal, Reply
from service.ipc.messages.models import Manifest
from service.ipc.messages.store import FlushSessions
from service.ipc.process_config import ProcessConfig
from service.ipc.quota_counts import QuotaCounts
from service.ipc.session_journal import SessionJournal, journal_records
from service.ipc.suspect_turns import SuspectTurns
from service.ipc.trace_socket import TraceSockets
from service.log import Log
from service.metrics import Metrics, Snapshot
from service.settings import Settings
from service.supervisor import numa, ports
from service.supervisor.health import HealthPort
from service.supervisor.metrics_aggregator import COLLECT_SECONDS, MetricsAggregator
from service.supervisor.placement import place_processes
from service.supervisor.ports import Addresses
from service.supervisor.process import ENGINE, FRONTEND, STORE, TRACER, Child, connect, start
from service.supervisor.reload import ModelReloader
from service.supervisor.repository import Repository
from service.supervisor.trials import Trials

LONGEST_DELAY_SECONDS = 5.0
FORGIVEN_SECONDS = 60.0
"""After this time an exit no longer delays the next restart."""
STARTS_ALLOWED = 3
"""A process that ends this often before the service was ever ready stops the start."""
FLUSH_SECONDS = 5.0
"""How long the sessions may take to be saved at the end, at least. What remains of drain_seconds comes on top."""
FLUSH_AGAIN_SECONDS = 0.1
KILL_MARGIN_SECONDS = 1.0
"""How much longer than drain_seconds a frontend may take to exit."""


class Supervisor:
    """`serve` runs the service. `announce` is called once, when all processes are ready."""

    def __init__(self, settings: Settings, log: Log, announce: Callable[[Addresses], None]) -> None:
        """Raises StartError when the models folder cannot be served or a port is taken."""
        self._settings = settings
        self._log = log
        self._announce = announce
        self._announced = False
        self._metrics = Metrics()
        self._metrics.ready.set(0.0)
        self._is_ready = False
        self._metrics_aggregator = MetricsAggregator(self._metrics)
        self._children: dict[str, Child] = {}
        self._exits: dict[str, list[float]] = {}
        """Times of the recent exits and failed starts of each process."""
        self._calls: dict[tuple[Child, int], asyncio.Task[None]] = {}
        self._leaving_out: set[asyncio.Task[None]] = set()
        """Versions that a process started without, while the other processes learn of it."""
        self._stop_requested = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._draining = False
        self._frontends_closed = False
        self._handlers: dict[type[Message], Callable[[Child, int, Any], None]] = {
            Ready: self._handle_ready,
            Failed: self._handle_failed,
            NotLoaded: self._handle_not_loaded,
            TrialBegan: self._handle_trial_began,
            TrialEnded: self._handle_trial_ended,
            MetricsCollected: self._handle_late_metrics,
            Cancel: self._handle_cancel,
        }
        self._call_handlers: dict[type[Message], Callable[[Any], Awaitable[Reply]]] = {
            ScrapeMetrics: self._handle_scrape,
            ListModels: self._handle_list_models,
            LoadModel: self._handle_load,
            UnloadModel: self._handle_unload,
        }
        repository = Repository(settings.models, settings.versions, settings.alias)
        self._trials = Trials()
        self._model_reloader = ModelReloader(
            repository, settings, self._children.values, self._metrics_aggregator.forget_model, self._trials, self._metrics, log
        )
        self._engine_names = [f"{ENGINE}-{place}" for place in range(len(settings.devices))]
        self._placement = place_processes(settings)
        self._names = [*self._engine_names, *(f"{FRONTEND}-{place}" for place in range(self._placement.frontends))]
        self._traces = TraceSockets() if settings.trace_endpoint else None
        if self._traces is not None:
            self._names.append(f"{TRACER}-0")
        self._replica = secrets.token_hex(8)
        if settings.session_store:
            self._names.append(f"{STORE}-0")
        for role in (ENGINE, FRONTEND):
            self._metrics.processes.set(sum(name.startswith(role) for name in self._names), role)
        self._journals = {name: SessionJournal(journal_records(settings)) for name in self._engine_names}
        self._connection_counts = ConnectionCounts.create(self._placement.frontends)
        self._quota_counts = QuotaCounts.create(self._placement.frontends)
        self._suspect_turns = SuspectTurns.create()
        self._sockets = ports.open_sockets(settings)
        health = self._sockets.health
        self._health = None if health is None else HealthPort(health, settings, lambda: self._is_ready, self._collect, log)

    @property
    def manifest(self) -> Manifest:
        """Return the versions that are served, or will be as soon as they are loaded."""
        return self._model_reloader.manifest

    def serve(self) -> None:
        """Run the service until SIGTERM, SIGHUP or an interrupt, and drain it; raises StartError when it cannot start."""
        try:
            asyncio.run(self._run())
        except BaseExceptionGroup as group:
            start_errors = [error for error in group.exceptions if isinstance(error, StartError)]
            if not start_errors:
                raise
            raise start_errors[0] from None
        self._log.info("ended")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._log_bug)
        self._log.info(
            "starting",
            cores=self._placement.cores,
            frontends=self._placement.frontends,
            engines=len(self._engine_names),
            compute_threads=self._placement.compute_threads,
        )
        for number in (signal.SIGTERM, signal.SIGHUP):
            _on_signal(number, loop, self._stop_requested.set)
        _on_signal(signal.SIGINT, loop, self._interrupt)
        try:
            if self._health is not None:
                await self._health.open()
            async with asyncio.TaskGroup() as tasks:
                running = {name: tasks.create_task(self._keep_running(name)) for name in self._names}
                watching = [tasks.create_task(self._watch_heartbeats())]
                if self._settings.reload == "poll":
                    watching.append(tasks.create_task(self._model_reloader.poll()))
                await self._stop_requested.wait()
                await self._drain(running)
                self._model_reloader.close()
                for task in (*watching, *running.values()):
                    task.cancel()
        finally:
            await self._end()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # it stops already

    async def _end(self) -> None:
        """End all processes and free the resources of the supervisor."""
        self._sockets.close()
        self._model_reloader.close()
        for task in (*self._calls.values(), *self._leaving_out):
            task.cancel()
        children = self._children.values()
        # Close all channels before waiting for the first process: they all exit at the same time.
        for child in children:
            child.close_channel()
        await asyncio.gather(*(child.reap(PATIENCE_SECONDS) for child in children))
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        if self._health is not None:
            self._health.close()
        for journal in self._journals.values():
            journal.close()
        if self._traces is not None:
            self._traces.close()

    # Start, watch, restart.

    async def _keep_running(self, name: str) -> None:
        """Run one process after another under this name; raises StartError when no process becomes ready."""
        while not self._is_closed(name):
            try:
                child = self._start(name)
            except OSError as error:
                delay = self._restart_delay(name)
                self._log.error("process not started", child=name, error=str(error), retry_seconds=round(delay, 2))
            else:
                await child.ended.wait()
                await self._reap(child)
                if self._is_closed(name):
                    return
                delay = self._restart_delay(name, child)
            await asyncio.sleep(delay)

    def _is_closed(self, name: str) -> bool:
        """Whether this process is not restarted any more: while frontends drain, they need the engines, and the engines the store."""
        return self._frontends_closed and name not in self._engine_names and not name.startswith(STORE)

    def _start(self, name: str) -> Child:
        """Start a process and connect it with all processes of the other role; raises OSError, with nothing left behind."""
        is_engine = name in self._engine_names
        node, cores = self._placement.pinned.get(name, (None, None))
        config = self._config(name)
        child = start(name, config, self._handle_message, start_seconds=self._settings.start_seconds, cores=cores)
        try:
            for other in self._children.values():
                if is_engine and other.role in (FRONTEND, STORE):
                    connect(other, child)
                elif child.role in (FRONTEND, STORE) and other.role == ENGINE:
                    connect(child, other)
        except OSError:
            child.abandon()
            raise
        pinned = {} if cores is None else {"numa_node": node, "cores": numa.format_cores(cores)}
        self._log.info("started", child=name, pid=child.process.pid, **pinned)
        if self._draining:
            child.send(Drain())
        self._children[name] = child
        return child

    def _config(self, name: str) -> ProcessConfig:
        """Return the configuration of a process, with the descriptors that a process of its role inherits."""
        role, _, place = name.partition("-")
        inherited: dict[str, int] = {}
        if role == FRONTEND:
            sockets = zip(("http", "grpc", "admin"), self._sockets[:-1], strict=True)
            inherited = {field: listening.fileno() for field, listening in sockets if listening is not None}
            inherited["connections"] = self._connection_counts.descriptor
            inherited["quotas"] = self._quota_counts.descriptor
            inherited["suspects"] = self._suspect_turns.descriptor
        elif role == ENGINE:
            inherited["journal"] = self._journals[name].descriptor
        if self._traces is not None and role in (FRONTEND, TRACER):
            inherited["traces"] = self._traces.reading if role == TRACER else self._traces.writing
        return ProcessConfig(
            parent=os.getpid(),
            settings=self._settings.model_dump_json(),
            control=-1,
            place=int(place),
            compute_threads=self._placement.compute_threads,
            **inherited,
            replica=self._replica,
            manifest=self._model_reloader.engine_manifest() if role == ENGINE else self.manifest,
            strict=self._settings.strict and not self._announced,
            is_restart=self._announced,
        )

    async def _reap(self, child: Child) -> None:
        """Release what a dead child process held, keep its totals and log why it ended."""
        status = await child.reap()
        for (caller, _), call in self._calls.items():
            if caller is child:
                call.cancel()
        del self._children[child.name]
        if child.role == FRONTEND:
            self._connection_counts.remove(child.place)
            self._quota_counts.remove(child.place)
        self._metrics_aggregator.keep_totals(child)
        if child.failure is not None and not self._announced:
            raise StartError(child.failure)
        if self._is_closed(child.name):
            return
        tried = {"on_trial": [f"{key.name}/{key.version}" for key in sorted(child.on_trial)]} if child.on_trial else {}
        self._log.warning("child ended", child=child.name, status=status, reason=child.exit_reason, **tried)
        self._metrics.restarts.add(child.role, child.exit_reason)
        self._count_against_trials(child)
        self._update_ready()

    def _count_against_trials(self, engine: Child) -> None:
        """Count the end of an engine against the versions that it tried, and stop serving a version with which all engines end."""
        for key in engine.on_trial:
            ran_elsewhere = any(key in other.ran for other in self._children.values())
            error = self._trials.count_end(key, survived=engine.survived, ran_elsewhere=ran_elsewhere)
            if error is not None:
                self._begin_leaving_out(engine, NotLoaded(key, error.code, error.message), everywhere=True)

    def _restart_delay(self, name: str, ended: Child | None = None) -> float:
        """Return the seconds until the next start: none after a first exit, then doubling with jitter.

        ended: the last process of this name, None if it could not be started.
        """
        now = time.monotonic()
        exits = self._exits[name] = [exit for exit in self._exits.get(name, []) if now - exit < FORGIVEN_SECONDS] + [now]
        if not self._announced and len(exits) >= STARTS_ALLOWED and not self._starts_without_tried(ended):
            tried = sorted(ended.on_trial) if ended is not None else []
            last = "".join(f", the last time while it tried {key.name} version {key.version}" for key in tried[:1])
            raise StartError(f"the {name} process ended {len(exits)} times before it was ready{last}: see its log lines")
        if len(exits) == 1:
            return 0.0
        return min(LONGEST_DELAY_SECONDS, 0.1 * 2.0 ** len(exits)) * random.uniform(0.5, 1.0)

    def _starts_without_tried(self, ended: Child | None) -> bool:
        """Return whether the versions that an engine tried at its end can be left out: it has loaded another version."""
        return ended is not None and bool(ended.on_trial and ended.survived - ended.on_trial) and not self._settings.strict

    async def _watch_heartbeats(self) -> None:
        """Kill children with late heartbeats, and notice an exit even when another process holds the channel open."""
        patient_until = 0.0
        while True:
            before = time.monotonic()
            await asyncio.sleep(IDLE_SECONDS)
            now = time.monotonic()
            if now - before > PATIENCE_SECONDS / 2:
                # This process did not run for a while. Neither did the children then: their lateness proves nothing.
                patient_until = now + PATIENCE_SECONDS
            for child in self._children.values():
                if child.exited:
                    # Its last messages come first.
                    asyncio.get_running_loop().call_later(IDLE_SECONDS, child.ended.set)
                elif child.hung and now >= patient_until and not child.ended.is_set():
                    child.kill("hung")

    def _update_ready(self) -> None:
        """The service is ready while an engine and a frontend are. It is announced once all processes are."""
        ready = [child for child in self._children.values() if child.ready]
        self._is_ready = {child.role for child in ready} >= {ENGINE, FRONTEND} and not self._draining
        self._metrics.ready.set(float(self._is_ready))
        if not self._announced and len(ready) == len(self._names) and not self._leaving_out:
            self._announced = True
            try:
                self._announce(ports.addresses(self._sockets, self._settings))
            except OSError as error:
                self._log.warning("standard output cannot be written", error=str(error))

    # Messages of the children.

    def _handle_message(self, child: Child, frame: Frame) -> None:
        handler = self._handlers.get(type(frame.message))
        call_handler = self._call_handlers.get(type(frame.message))
        if handler is not None:
            handler(child, frame.id, frame.message)
        elif call_handler is not None:
            self._answer(child, frame, call_handler)

    def _handle_ready(self, child: Child, id: int, message: Ready) -> None:
        child.ready = True
        self._update_ready()

    def _handle_failed(self, child: Child, id: int, message: Failed) -> None:
        child.failure, child.exit_reason = message.reason, "failed"
        self._log.error("child failed", child=child.name, reason=message.reason)
        child.ended.set()

    def _handle_not_loaded(self, child: Child, id: int, message: NotLoaded) -> None:
        """At the start, a version is served only if every process has it. Later, while any process of the role has it."""
        child.not_loaded.add(message.key)
        same_role = [other for other in self._children.values() if other.role == child.role]
        everywhere = not self._announced or all(message.key in other.not_loaded for other in same_role)
        self._begin_leaving_out(child, message, everywhere=everywhere)

    def _handle_trial_began(self, child: Child, id: int, message: TrialBegan) -> None:
        child.on_trial.add(message.key)

    def _handle_trial_ended(self, child: Child, id: int, message: TrialEnded) -> None:
        child.on_trial.discard(message.key)
        if message.ran:
            child.ran.add(message.key)
            self._trials.count_pass(message.key)
        else:
            child.survived.add(message.key)

    def _begin_leaving_out(self, child: Child, message: NotLoaded, *, everywhere: bool) -> None:
        task = asyncio.get_running_loop().create_task(self._leave_out(child, message, everywhere))
        self._leaving_out.add(task)
        task.add_done_callback(self._handle_left_out)

    async def _leave_out(self, child: Child, message: NotLoaded, everywhere: bool) -> None:
        error = Refusal(message.code, message.reason).error
        await self._model_reloader.leave_out(message.key, error, everywhere=everywhere)
        if not self._announced and not self.manifest.model_versions:
            self._handle_failed(child, 0, Failed(error.message))

    def _handle_left_out(self, task: asyncio.Task[None]) -> None:
        self._leaving_out.discard(task)
        self._update_ready()

    def _handle_late_metrics(self, child: Child, id: int, message: MetricsCollected) -> None:
        child.metrics = message.snapshot

    def _handle_cancel(self, child: Child, id: int, message: Cancel) -> None:
        """The client of a call has disconnected, or the frontend no longer waits for its reply."""
        call = self._calls.get((child, id))
        if call is not None:
            call.cancel()

    async def _collect(self, timeout: float) -> Snapshot:
        return await self._metrics_aggregator.collect(list(self._children.values()), timeout)

    # Calls of the children.

    async def _handle_scrape(self, message: ScrapeMetrics) -> Reply:
        return MetricsCollected(await self._collect(COLLECT_SECONDS))

    async def _handle_list_models(self, message: ListModels) -> Reply:
        return ModelsListed(await self._model_reloader.index())

    async def _handle_load(self, message: LoadModel) -> Reply:
        await self._model_reloader.load(message.name, message.policy)
        return Done()

    async def _handle_unload(self, message: UnloadModel) -> Reply:
        await self._model_reloader.unload(message.name)
        return Done()

    def _answer(self, child: Child, call: Frame, handler: Callable[[Any], Awaitable[Reply]]) -> None:
        """Handle a call in a task and send its reply."""

        async def answer() -> None:
            try:
                reply = await handler(call.message)
            except ServiceError as error:
                reply = Refusal.of(error)
            except Exception as error:
                self._log.error("bug", error=f"{type(error).__name__}: {error}")
                reply = Refusal.of(InferenceFailed("the supervisor failed on this call: its log has the error"))
            child.send(reply, call.id)

        task = self._calls[child, call.id] = asyncio.get_running_loop().create_task(answer())
        task.add_done_callback(lambda _: self._calls.pop((child, call.id), None))

    # Shutdown.

    def _interrupt(self) -> None:
        """An interrupt, from a keyboard, also cuts the lame-duck time short."""
        self._stop_requested.set()
        self._interrupted.set()

    async def _drain(self, running: dict[str, asyncio.Task[None]]) -> None:
        """Report not ready, serve for the lame-duck time, close the ports and let the frontends finish their requests."""
        self._log.info("draining", lame_duck_seconds=self._settings.lame_duck_seconds, seconds=self._settings.drain_seconds)
        self._draining = True
        self._update_ready()
        for frontend in self._frontends:
            frontend.send(Drain())
        if self._announced:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._interrupted.wait(), self._settings.lame_duck_seconds)
        self._frontends_closed = True
        self._sockets.close()
        for frontend in self._frontends:
            frontend.process.terminate()
        draining = [running[frontend.name] for frontend in self._frontends]
        until = time.monotonic() + self._settings.drain_seconds
        if draining:
            await asyncio.wait(draining, timeout=self._settings.drain_seconds + KILL_MARGIN_SECONDS)
        for frontend in self._frontends:
            frontend.kill("ended")
        if self._settings.session_store:
            await self._flush_sessions(max(FLUSH_SECONDS, until - time.monotonic()))

    async def _flush_sessions(self, seconds: float) -> None:
        """Save all sessions. The process of the store may end meanwhile, and start again."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for store in [child for child in self._children.values() if child.role == STORE and child.ready]:
                with contextlib.suppress(ServiceError):
                    await store.call(FlushSessions(left), Done, timeout=left + KILL_MARGIN_SECONDS)
                    return
            await asyncio.sleep(FLUSH_AGAIN_SECONDS)
        self._log.error("sessions not saved", seconds=seconds)

    @property
    def _frontends(self) -> list[Child]:
        return [child for child in self._children.values() if child.role == FRONTEND]

    def _log_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback fails the work of this callback, and nothing else."""
        self._log.error("bug", error=repr(context.get("exception") or context["message"]))


def _on_signal(number: signal.Signals, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call back in the event loop at a signal.

    A handler of the event loop itself would be reset to the default when the loop closes: a late signal would change the exit status.
    """
    if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(callback))
