"""One child process as its supervisor holds it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field

import msgspec

from service.ipc.channel import Channel, pair
from service.ipc.heartbeat import PATIENCE_SECONDS, Heartbeat
from service.ipc.messages import Manifest
from service.ipc.process_config import DEVICE_LOST, ProcessConfig
from service.ipc.session_journal import SessionJournal
from service.metrics import Snapshot
from service.settings import Settings

ENGINE = "engine"
LAST_WORD_SECONDS = 0.5
"""How long a process that has closed its control channel may take to end by itself."""
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "TOKENIZERS_PARALLELISM": "false", "GRPC_VERBOSITY": "NONE"}
"""Compute threads that wait must sleep: the fronts share the cores. What gRPC's core says is no line of the log."""


@dataclass(slots=True, eq=False)
class Child:
    """`name` is its place in the house (engine-0, front-0), which its successor takes over; `verdict` is why it ended."""

    name: str
    process: subprocess.Popen[bytes]
    control: Channel
    heartbeat: Heartbeat | None
    ready: bool = False
    counts: Snapshot = field(default_factory=dict)
    verdict: str = "ended"

    @property
    def role(self) -> str:
        """engine or front."""
        return self.name.partition("-")[0]

    @property
    def ended(self) -> bool:
        return not self.control.open or self.process.poll() is not None

    def tell(self, frame: bytes) -> None:
        self.control.send(frame)
        self.control.flush()

    def kill_if_hung(self) -> None:
        """End a process whose next sign of life is overdue: a stopped one, or one in a turn without end."""
        if self.heartbeat is not None and self.heartbeat.late_seconds() > 0:
            self.verdict = "hung"
            self.process.kill()
            self.process.wait()

    def reap(self) -> int:
        """Make sure that it has ended and give back what it held; returns its exit status, which may be the verdict."""
        # Its end of the channel closes a moment before it ends: killed in that moment, it could not say why.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORD_SECONDS)
        self.process.kill()
        status = self.process.wait()
        if self.role == ENGINE and self.verdict == "ended" and status == DEVICE_LOST:
            self.verdict = "device_lost"
        self.control.close()
        if self.heartbeat is not None:
            self.heartbeat.close()
        return status

    def end(self) -> None:
        """Close its control channel, which tells it to end, and see that it does."""
        self.control.close()
        try:
            self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(
    name: str,
    settings: Settings,
    listening: int,
    grpc: str | None = None,
    journal: SessionJournal | None = None,
    *,
    manifest: Manifest,
    strict: bool,
) -> Child:
    """A new process. An engine has a pulse, whose first beat is due when its models must be loaded, and its place's journal; a front has
    the port, and the address of the one that it opens itself. strict: it cannot start without one of the models."""
    role, _, place = name.partition("-")
    mine, theirs = pair()
    heartbeat = Heartbeat() if role == ENGINE else None
    if heartbeat is not None:
        heartbeat.beat(settings.start_seconds)
    process_config = ProcessConfig(
        supervisor=os.getpid(),
        settings=settings.model_dump_json(),
        control=theirs.fileno(),
        place=int(place),
        listening=-1 if heartbeat else listening,
        grpc=None if heartbeat else grpc,
        heartbeat=heartbeat.descriptor if heartbeat else -1,
        journal=journal.descriptor if journal else -1,
        manifest=manifest,
        strict=strict,
    )
    child = Child(name, _spawn(role, process_config), Channel(mine), heartbeat)
    theirs.close()
    return child


def _spawn(role: str, process_config: ProcessConfig) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that an interrupt at the keyboard reaches only the supervisor."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"service.{role}"],
        stdin=subprocess.PIPE,
        pass_fds=[
            descriptor
            for descriptor in (
                process_config.control,
                process_config.listening,
                process_config.heartbeat,
                process_config.journal,
            )
            if descriptor >= 0
        ],
        env={**os.environ, **QUIET},
        process_group=0,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(process_config))
    process.stdin.close()
    return process
