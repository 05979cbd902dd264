"""Starts, watches and replaces the other processes; opens the ports; gathers the metrics. Answers no request itself.

Down is up reversed: say not ready, serve on for the lame-duck time, close the ports, let the fronts drain, end the engines.
"""

from __future__ import annotations

import random
import selectors
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

from service.errors import StartError
from service.ipc import messages
from service.ipc.channel import Frame, encode, pair
from service.ipc.heartbeat import PATIENCE_SECONDS
from service.ipc.messages import Manifest, ModelKey
from service.ipc.session_journal import SessionJournal, journal_records
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from service.supervisor.metrics_aggregator import MetricsAggregator
from service.supervisor.process import ENGINE, Child, start
from service.supervisor.reload import ModelReloader
from service.supervisor.repository import Repository

TICK_SECONDS = 0.05
BACKLOG = 2048
LONGEST_DELAY_SECONDS = 5.0
FORGIVEN_SECONDS = 60.0
"""A death is forgiven, and the next successor starts at once, after this long."""
STARTS_ALLOWED = 3
"""A process that ends this often before the service was ever ready stops the start."""


class Supervisor:
    """`serve` runs it all. `announce` is called once, with the addresses of HTTP and of gRPC, when requests are answered."""

    def __init__(self, settings: Settings, log: Log, announce: Callable[[str, str | None], None]) -> None:
        self._settings = settings
        self._log = log
        self._announce = announce
        self._announced = False
        self._metrics = Metrics()
        self._metrics.ready.set(0.0)
        self._metrics_aggregator = MetricsAggregator(self._metrics)
        self._selector = selectors.DefaultSelector()
        engines, frontends = range(len(settings.devices)), range(settings.frontends)
        self._names = [*(f"{ENGINE}-{place}" for place in engines), *(f"frontend-{place}" for place in frontends)]
        self._journals = {f"{ENGINE}-{place}": SessionJournal(journal_records(settings)) for place in engines}
        self._children: dict[str, Child] = {}
        repository = Repository(settings.models, settings.versions)
        self._model_reloader = ModelReloader(repository, settings, self._children.values, self._forget, self._metrics, log)
        self._listening = _open_port(settings)
        self._grpc = _reserve_port(settings) if settings.grpc else None
        self._due = dict.fromkeys(self._names, 0.0)
        self._deaths: dict[str, list[float]] = {name: [] for name in self._names}
        self._fault: str | None = None
        self._last_tick = time.monotonic()
        self._patient_until = 0.0
        self._signal: int | None = None
        self._close_at: float | None = None
        self._kill_at: float | None = None

    @property
    def manifest(self) -> Manifest:
        """What is served, or will be as soon as it is loaded."""
        return self._model_reloader.manifest

    def serve(self) -> None:
        """Run until a signal and through the drain after it; raises StartError when the service cannot start."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            while not self._over():
                self._tick()
        finally:
            self._close_ports()
            self._model_reloader.close()
            # All are told before one is waited for: they end side by side.
            for child in self._children.values():
                child.control.close()
            for child in self._children.values():
                child.end()
            for journal in self._journals.values():
                journal.close()
        if self._fault is not None:
            raise StartError(self._fault)
        self._log.info("ended")

    @property
    def _engines(self) -> list[Child]:
        return [child for child in self._children.values() if child.role == ENGINE]

    @property
    def _frontends(self) -> list[Child]:
        return [child for child in self._children.values() if child.role != ENGINE]

    def _tick(self) -> None:
        """Who spoke, who hangs, who has ended, who is due, how far the drain is."""
        for key, _ in self._selector.select(TICK_SECONDS):
            for frame in key.data.control.receive():
                self._handle_frame(key.data, frame)
        self._note_own_lateness()
        for child in list(self._children.values()):
            child.control.flush()
            if time.monotonic() > self._patient_until:
                child.kill_if_hung()
            if child.ended:
                self._reap(child)
        self._start_due()
        self._model_reloader.step()
        self._metrics_aggregator.answer(self._children.values())
        self._drain()

    def _handle_frame(self, child: Child, frame: Frame) -> None:
        message = frame.message
        match message:
            case messages.Ready():
                child.ready = True
                self._look_ready()
            case messages.Failed(reason=reason):
                self._failed(child, reason)
            case messages.ScrapeMetrics():
                self._metrics_aggregator.ask(child, frame.id, self._children.values())
            case messages.MetricsCollected(snapshot=snapshot):
                self._metrics_aggregator.count(child, frame.id, snapshot)
            case messages.LoadModel() | messages.UnloadModel() | messages.ListModels():
                self._model_reloader.ask(child, frame)
            case messages.Reply():
                self._model_reloader.handle_reply(child, frame)

    def _note_own_lateness(self) -> None:
        """When this process itself was not run for a while, nor were the engines: their lateness proves nothing."""
        now = time.monotonic()
        if now - self._last_tick > PATIENCE_SECONDS / 2:
            self._patient_until = now + PATIENCE_SECONDS
        self._last_tick = now

    def _look_ready(self) -> None:
        """Ready while an engine is loaded and a front has met one; announced once all of them are."""
        engine, frontend = (any(child.ready for child in children) for children in (self._engines, self._frontends))
        self._metrics.ready.set(float(engine and frontend and self._signal is None))
        ready = [child for child in self._children.values() if child.ready]
        if not self._announced and len(ready) == len(self._names):
            self._announced = True
            self._announce(_address(self._listening), self._grpc_address)

    @property
    def _grpc_address(self) -> str | None:
        return None if self._grpc is None else _address(self._grpc)

    def _forget(self, key: ModelKey) -> None:
        """A version is not served any more, and nothing is left of it."""
        self._metrics_aggregator.forget_model(*key.labels)

    # Birth and death.

    def _start_due(self) -> None:
        for name, due in list(self._due.items()):
            if due <= time.monotonic() and (name.startswith(ENGINE) or self._kill_at is None):
                del self._due[name]
                self._start(name)

    def _start(self, name: str) -> None:
        child = start(
            name,
            self._settings,
            self._listening.fileno(),
            self._grpc_address,
            self._journals.get(name),
            manifest=self._model_reloader.to_load() if name.startswith(ENGINE) else self.manifest,
            strict=not self._announced,
        )
        self._log.info("started", child=name, pid=child.process.pid)
        self._selector.register(child.control, selectors.EVENT_READ, child)
        for other in self._children.values():
            if (other.role == ENGINE) != (child.role == ENGINE):
                _join(child, other)
        if self._signal is not None:
            child.tell(encode(messages.Drain()))
        self._children[name] = child

    def _reap(self, child: Child) -> None:
        """Take a child that has ended out of the house; its place is filled, unless the house closes."""
        self._selector.unregister(child.control)
        status = child.reap()
        del self._children[child.name]
        self._metrics_aggregator.forget(child)
        self._model_reloader.forget(child)
        if self._kill_at is not None and child.role != ENGINE:
            return
        self._log.warning("child ended", child=child.name, status=status, verdict=child.verdict)
        self._metrics.restarts.add(child.role, child.verdict)
        self._look_ready()
        self._due[child.name] = time.monotonic() + self._delay(child.name)

    def _delay(self, name: str) -> float:
        """Seconds until the successor starts: none after a first death, then doubling with jitter."""
        now = time.monotonic()
        deaths = self._deaths[name] = [then for then in self._deaths[name] if now - then < FORGIVEN_SECONDS] + [now]
        if not self._announced and len(deaths) >= STARTS_ALLOWED:
            self._fault = self._fault or f"the {name} process ended {len(deaths)} times before it was ready: its log says why"
        if len(deaths) == 1:
            return 0.0
        return min(LONGEST_DELAY_SECONDS, 0.1 * 2.0 ** len(deaths)) * random.uniform(0.5, 1.0)

    def _failed(self, child: Child, reason: str) -> None:
        child.verdict = "failed"
        self._log.error("child failed", child=child.name, reason=reason)
        if not self._announced:
            self._fault = reason

    # The end.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """A second SIGTERM does not restart the drain; an interrupt, from a keyboard, cuts the lame-duck time short."""
        if self._signal is None or number == signal.SIGINT:
            self._signal = number

    def _drain(self) -> None:
        if self._signal is None:
            return
        now = time.monotonic()
        if self._close_at is None:
            self._log.info("draining", lame_duck_seconds=self._settings.lame_duck_seconds, seconds=self._settings.drain_seconds)
            self._close_at = now + self._settings.lame_duck_seconds
            self._look_ready()
            for frontend in self._frontends:
                frontend.tell(encode(messages.Drain()))
        if self._kill_at is None and (now >= self._close_at or self._signal == signal.SIGINT or not self._announced):
            self._kill_at = now + self._settings.drain_seconds + 1.0
            self._close_ports()
            for frontend in self._frontends:
                frontend.process.terminate()
        if self._kill_at is not None and now > self._kill_at:
            for frontend in self._frontends:
                frontend.process.kill()

    def _close_ports(self) -> None:
        self._listening.close()
        if self._grpc is not None:
            self._grpc.close()

    def _over(self) -> bool:
        return self._fault is not None or (self._kill_at is not None and not self._frontends)


def _join(one: Child, other: Child) -> None:
    """A channel between a front and an engine."""
    for child, end in zip((one, other), pair(), strict=True):
        child.control.send(encode(messages.Attach()), attached=end)
        child.control.flush()
        end.close()


def _open_port(settings: Settings) -> socket.socket:
    """The HTTP port, on which every front takes connections from one queue: where one of them stands still, the others go on."""
    listening = _bound(settings.host, settings.port, socket.SO_REUSEADDR, "choose another with --host or --port")
    listening.listen(BACKLOG)
    return listening


def _reserve_port(settings: Settings) -> socket.socket:
    """The gRPC port, which each front opens itself: bound so that nobody else gets it, and never listened to.

    A socket that nobody shares a port with is bound to it first: whoever else has it stops the start, and none of the fronts.
    """
    way_out = "choose another with --grpc-port, or do without gRPC with SEQSERVE_GRPC=0"
    _bound(settings.host, settings.grpc_port, socket.SO_REUSEADDR, way_out).close()
    return _bound(settings.host, settings.grpc_port, socket.SO_REUSEPORT, way_out)


def _bound(host: str, port: int, shared: int, way_out: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, shared, 1)
    try:
        made.bind((host, port))
    except OSError as fault:
        made.close()
        raise StartError(f"cannot listen on {host} port {port}: {fault.strerror}; {way_out}") from fault
    return made


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"
