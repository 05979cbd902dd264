"""Starts, watches and replaces the other processes; opens the port; gathers the metrics. Answers no request itself.

Down is up reversed: say not ready, serve on for the lame-duck time, close the port, let the fronts drain, end the engine.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import msgspec

from service.channel import Channel, Frame, Kind, encode, pair
from service.errors import StartError
from service.lifeline import PATIENCE_SECONDS, Birth, Pulse
from service.logs import Log
from service.metrics import Metrics, Snapshot, merged, remains
from service.settings import Settings

TICK_SECONDS = 0.05
GATHER_SECONDS = 0.2
BACKLOG = 2048
ENGINE = "engine"
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "TOKENIZERS_PARALLELISM": "false"}
"""Compute threads that wait must sleep: the fronts share the cores."""

LONGEST_DELAY_SECONDS = 5.0
FORGIVEN_SECONDS = 60.0
STARTS_ALLOWED = 3
"""A process that ends this often before the service was ever ready stops the start."""


@dataclass(slots=True, eq=False)
class Child:
    """One living process. `name` is its place in the house (engine, front-0), which its successor takes over."""

    name: str
    process: subprocess.Popen[bytes]
    control: Channel
    pulse: Pulse | None
    ready: bool = False
    counts: Snapshot = field(default_factory=dict)
    verdict: str = "ended"

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


@dataclass(slots=True, eq=False)
class Gathering:
    """One scrape under way: who asked, under which id, who has not answered yet, and until when that is waited for."""

    front: Child
    id: int
    missing: set[Child]
    until: float


class Supervisor:
    """`serve` runs it all. `announce` is called once, with host and port, when requests are answered."""

    def __init__(self, settings: Settings, log: Log, announce: Callable[[str, int], None]) -> None:
        self._settings = settings
        self._log = log
        self._announce = announce
        self._metrics = Metrics()
        self._past: Snapshot = {}
        self._children: dict[str, Child] = {}
        self._due: dict[str, float] = {}
        self._deaths: dict[str, list[float]] = {}
        self._gatherings: dict[int, Gathering] = {}
        self._last_gathering = 0
        self._selector = selectors.DefaultSelector()
        self._announced = False
        self._fault: str | None = None
        self._drain_at: float | None = None
        self._kill_at: float | None = None
        self._last_tick = time.monotonic()
        self._patient_until = 0.0

    def serve(self) -> int:
        """Run until a signal and the drain after it; raises StartError when the service cannot start."""
        self._listening = _open_port(self._settings)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self._due = dict.fromkeys(self._names(), 0.0)
        try:
            while not self._over():
                self._tick()
            if self._fault is not None:
                raise StartError(self._fault)
        finally:
            self._end_all()
        self._log.info("ended")
        return 0

    # One tick: who spoke, who died, who hangs, who is due, how far the drain is.

    def _tick(self) -> None:
        for key, _ in self._selector.select(TICK_SECONDS):
            self._hear(key.data)
        self._note_own_lateness()
        for child in list(self._children.values()):
            child.control.flush()
            self._watch(child)
            if not child.control.open or child.process.poll() is not None:
                self._bury(child)
        self._start_due()
        self._end_gatherings()
        self._drain()

    def _hear(self, child: Child) -> None:
        for frame in child.control.receive():
            if frame.kind == Kind.READY:
                child.ready = True
                self._announce_once()
            elif frame.kind == Kind.FAILED:
                self._failed(child, frame.read(str))
            elif frame.kind == Kind.SCRAPE:
                self._gather(child, frame.id)
            elif frame.kind == Kind.COUNTS:
                self._count(child, frame)

    def _note_own_lateness(self) -> None:
        """When this process itself was not run for a while, nor was the engine: its lateness proves nothing."""
        now = time.monotonic()
        if now - self._last_tick > PATIENCE_SECONDS / 2:
            self._patient_until = now + PATIENCE_SECONDS
        self._last_tick = now

    def _watch(self, child: Child) -> None:
        if child.pulse is None or time.monotonic() < self._patient_until or child.pulse.late_seconds() < 0:
            return
        child.verdict = "hung"
        child.process.kill()
        child.process.wait()

    # Birth and death.

    def _names(self) -> list[str]:
        return [ENGINE, *(f"front-{index}" for index in range(self._settings.fronts))]

    def _start_due(self) -> None:
        for name, due in list(self._due.items()):
            if due <= time.monotonic() and (self._kill_at is None or name == ENGINE):
                del self._due[name]
                self._start(name)

    def _start(self, name: str) -> None:
        mine, theirs = pair()
        pulse = Pulse() if name == ENGINE else None
        if pulse is not None:
            pulse.beat(self._settings.start_seconds)
        birth = Birth(
            supervisor=os.getpid(),
            settings=self._settings.model_dump_json(),
            control=theirs.fileno(),
            listening=-1 if pulse else self._listening.fileno(),
            pulse=pulse.descriptor if pulse else -1,
        )
        child = Child(name, _spawn(name.partition("-")[0], birth), Channel(mine), pulse)
        theirs.close()
        self._children[name] = child
        self._selector.register(child.control, selectors.EVENT_READ, child)
        for other in self._children.values():
            if (other.role == ENGINE) != (child.role == ENGINE):
                self._join(child, other)
        self._log.info("started", child=name, pid=child.process.pid)

    def _join(self, one: Child, other: Child) -> None:
        """A channel between a front and an engine."""
        for child, end in zip((one, other), pair(), strict=True):
            child.control.send(encode(Kind.ATTACH, 0), attached=end)
            child.control.flush()
            end.close()

    def _bury(self, child: Child) -> None:
        """Take a child that has ended out of the house, keep its totals, and have its place filled unless the house closes."""
        child.process.kill()
        status = child.process.wait()
        del self._children[child.name]
        self._selector.unregister(child.control)
        child.control.close()
        if child.pulse is not None:
            child.pulse.close()
        self._past = merged([self._past, remains(child.counts)])
        for gathering in self._gatherings.values():
            gathering.missing.discard(child)
        if self._kill_at is not None and child.role != ENGINE:
            return
        self._metrics.restarts.add(child.role, child.verdict)
        self._log.warning("child ended", child=child.name, status=status, verdict=child.verdict)
        self._due[child.name] = time.monotonic() + self._delay(child.name)

    def _delay(self, name: str) -> float:
        """None after a first death, then doubling with jitter, while deaths are not long past."""
        now = time.monotonic()
        deaths = self._deaths[name] = [then for then in self._deaths.get(name, []) if now - then < FORGIVEN_SECONDS] + [now]
        if not self._announced and len(deaths) >= STARTS_ALLOWED:
            self._fault = f"the {name} process ended {len(deaths)} times before it was ready: its log lines say why"
        if len(deaths) == 1:
            return 0.0
        return min(LONGEST_DELAY_SECONDS, 0.1 * 2.0 ** len(deaths)) * random.uniform(0.5, 1.0)

    def _failed(self, child: Child, reason: str) -> None:
        child.verdict = "failed"
        self._log.error("child failed", child=child.name, reason=reason)
        if not self._announced:
            self._fault = reason

    def _announce_once(self) -> None:
        fronts = [self._children.get(name) for name in self._names() if name != ENGINE]
        if not self._announced and all(front is not None and front.ready for front in fronts):
            self._announced = True
            host, port = self._listening.getsockname()[:2]
            self._announce(host, port)

    # Metrics.

    def _gather(self, front: Child, id: int) -> None:
        """A front was scraped: ask everyone; who does not answer in time is counted with what it last said."""
        self._last_gathering += 1
        missing = set(self._children.values())
        self._gatherings[self._last_gathering] = Gathering(front, id, missing, time.monotonic() + GATHER_SECONDS)
        for child in missing:
            child.control.send(encode(Kind.GATHER, self._last_gathering))
            child.control.flush()

    def _count(self, child: Child, frame: Frame) -> None:
        child.counts = frame.read(Snapshot)
        if frame.id in self._gatherings:
            self._gatherings[frame.id].missing.discard(child)
            self._end_gatherings()

    def _end_gatherings(self) -> None:
        for id, gathering in list(self._gatherings.items()):
            if not gathering.missing or time.monotonic() > gathering.until:
                del self._gatherings[id]
                engine = self._children.get(ENGINE)
                self._metrics.ready.set(float(engine is not None and engine.ready and self._drain_at is None))
                counts = [self._metrics.snapshot(), self._past, *(child.counts for child in self._children.values())]
                gathering.front.control.send(encode(Kind.SCRAPED, gathering.id, merged(counts)))
                gathering.front.control.flush()

    # The end.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal starts the drain; an interrupt, from a keyboard, skips the lame-duck time."""
        if self._drain_at is None:
            lame_duck = self._settings.lame_duck_seconds if number == signal.SIGTERM and self._announced else 0.0
            self._drain_at = time.monotonic() + lame_duck
        elif number == signal.SIGINT:
            self._drain_at = min(self._drain_at, time.monotonic())

    def _drain(self) -> None:
        if self._drain_at is None:
            return
        fronts = [child for child in self._children.values() if child.role != ENGINE]
        for front in fronts:
            front.control.send(encode(Kind.DRAIN, 0))
            front.control.flush()
        if self._kill_at is None and time.monotonic() >= self._drain_at:
            self._log.info("draining", seconds=self._settings.drain_seconds)
            self._kill_at = time.monotonic() + self._settings.drain_seconds + 1.0
            self._listening.close()
            for front in fronts:
                front.process.terminate()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            for front in fronts:
                front.process.kill()

    def _over(self) -> bool:
        drained = self._kill_at is not None and all(child.role == ENGINE for child in self._children.values())
        return drained or self._fault is not None

    def _end_all(self) -> None:
        """The engine ends at the end-of-file of its control channel; who does not, is ended."""
        self._listening.close()
        for child in self._children.values():
            child.control.close()
        for child in self._children.values():
            try:
                child.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def _open_port(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as fault:
        listening.close()
        where = f"{settings.host} port {settings.port}"
        raise StartError(f"cannot listen on {where}: {fault.strerror}; choose another with --host or --port") from fault
    listening.listen(BACKLOG)
    return listening


def _spawn(role: str, birth: Birth) -> subprocess.Popen[bytes]:
    """A child in a process group of its own, so that an interrupt at the keyboard reaches only the supervisor."""
    process = subprocess.Popen(
        [sys.executable, "-m", "service.app", role],
        stdin=subprocess.PIPE,
        pass_fds=[descriptor for descriptor in (birth.control, birth.listening, birth.pulse) if descriptor >= 0],
        env={**os.environ, **QUIET},
        process_group=0,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(birth))
    process.stdin.close()
    return process
