"""One child process of the supervisor: its start, its messages, its heartbeat and its end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import msgspec

from service.errors import Unavailable
from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Channel, Frame, encode, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.control import Attach
from service.ipc.messages.message import Message, Reply
from service.ipc.messages.models import ModelKey
from service.ipc.process_config import DEVICE_LOST, ProcessConfig
from service.ipc.rpc import Rpc
from service.metrics import Snapshot

R = TypeVar("R", bound=Reply)
ENGINE, FRONTEND, TRACER, STORE = "engine", "frontend", "tracer", "store"
EXIT_SECONDS = 0.5
"""How long a process that has closed its control channel may take to exit by itself."""
KILL_SECONDS = 2.0
"""How long a killed process may take to end. A process that a device or a network disk holds in the kernel is left behind."""
CHILD_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # idle compute threads sleep: the frontends share the cores
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "GRPC_VERBOSITY": "NONE",  # gRPC's core does not write log lines of our format
}
FRONTEND_ENVIRONMENT = {
    # glibc keeps freed memory instead of returning it: the kernel would clear each page of each large body again.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}


class Child:
    """A running child process. `name` is its role and number (engine-0, frontend-1), which its successor takes over.

    `ended` is set when the process is gone or has to go; `exit_reason` tells why. `metrics` are the last that it sent. `failure` is its own
    account of why it cannot start. `not_loaded` has the model versions that it started without. `on_trial` has the versions that an engine
    loads or runs for the first time, `survived` the versions that it has loaded, and `ran` the versions that have completed a batch.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        control: Channel,
        heartbeat: Heartbeat | None,
        handle_message: Callable[[Child, Frame], None],
    ) -> None:
        """handle_message: receives every frame except replies to `call`."""
        self.name = name
        self.process = process
        self.ready = False
        self.metrics: Snapshot = {}
        self.exit_reason = "ended"
        self.failure: str | None = None
        self.not_loaded: set[ModelKey] = set()
        self.on_trial: set[ModelKey] = set()
        self.survived: set[ModelKey] = set()
        self.ran: set[ModelKey] = set()
        self.ended = asyncio.Event()
        self._heartbeat = heartbeat
        self._handle_message = handle_message
        self._channel = AsyncChannel(control, self._handle_frame, self._handle_close)
        self._rpc = Rpc(self._channel.send, name)

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def place(self) -> int:
        return int(self.name.partition("-")[2])

    def send(self, message: Message, id: int = 0) -> None:
        """Queue a message; it leaves as fast as the process reads."""
        self._channel.send_message(message, id)

    def attach(self, end: socket.socket, *, store: bool = False) -> None:
        """Pass one end of a channel to a process of the other role; the caller closes its own copy. Raises OSError.

        store: whether the other end belongs to the session store.
        """
        self._channel.send(encode(Attach(store)), attached=end)

    async def call(self, message: Message, reply: type[R], *, timeout: float | None = None) -> R:
        """Send a call and return its reply. Raises a ServiceError when it is refused or late, or when the process ends."""
        return (await self._rpc.call(message, reply, timeout=timeout))[0]

    @property
    def exited(self) -> bool:
        return self.process.poll() is not None

    @property
    def hung(self) -> bool:
        """Whether its next heartbeat is overdue: the process is stopped, or busy with something that does not end."""
        return self._heartbeat is not None and self._heartbeat.late_seconds() > 0

    def kill(self, exit_reason: str) -> None:
        """End the process now. It counts as ended even when the kernel does not let it go."""
        self.exit_reason = exit_reason
        self.process.kill()
        self.ended.set()

    def close_channel(self) -> None:
        """Close the control channel, which tells the process to exit; calls that wait for a reply fail."""
        self._channel.close()
        self._handle_close()

    async def reap(self, exit_seconds: float = EXIT_SECONDS) -> int | None:
        """Wait for the exit, kill the process if it is late, and release what it held.

        Returns the exit status, or None when the kernel does not let the process go.
        """
        self.close_channel()
        # The process closes its end a moment before it exits: killed in that moment, it could not report its exit status.
        if not await self._wait(exit_seconds):
            self.process.kill()
            await self._wait(KILL_SECONDS)
        status = self.process.returncode
        if self.role == ENGINE and self.exit_reason == "ended" and status == DEVICE_LOST:
            self.exit_reason = "device_lost"
        self._close_heartbeat()
        return status

    def abandon(self) -> None:
        """End a process that could not be connected, and release what it held."""
        self.close_channel()
        self.process.kill()
        self.process.wait()
        self._close_heartbeat()

    def _close_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    async def _wait(self, seconds: float) -> bool:
        """Return whether the process exits within `seconds`."""
        until, pause = time.monotonic() + seconds, 0.001
        while not self.exited and time.monotonic() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return self.exited

    def _handle_frame(self, frame: Frame) -> None:
        if not self._rpc.handle_reply(frame):
            self._handle_message(self, frame)

    def _handle_close(self) -> None:
        self._rpc.close(Unavailable(f"{self.name} has ended: retry", retry_after=1))
        self.ended.set()


def start(
    name: str,
    config: ProcessConfig,
    handle_message: Callable[[Child, Frame], None],
    *,
    start_seconds: float,
    cores: Set[int] | None,
) -> Child:
    """Start a process; raises OSError, with nothing left behind, when the system lacks the resources.

    config: without what belongs to this process alone: its control channel and its heartbeat. The first heartbeat is due after
    `start_seconds`, when its models must be loaded. cores: to which the process is pinned, None for all.
    """
    role = name.partition("-")[0]
    with ExitStack() as inherited, ExitStack() as on_error:
        near, far = pair()
        on_error.enter_context(near)
        inherited.enter_context(far)
        heartbeat = Heartbeat()
        on_error.callback(heartbeat.close)
        heartbeat.beat(start_seconds)
        config = msgspec.structs.replace(config, control=far.fileno(), heartbeat=heartbeat.descriptor)
        environment = CHILD_ENVIRONMENT | (FRONTEND_ENVIRONMENT if role == FRONTEND else {})
        with pinned(cores):
            process = config.spawn(f"service.{role}", **environment)
        on_error.callback(process.wait)
        on_error.callback(process.kill)
        child = Child(name, process, Channel(near), heartbeat, handle_message)
        on_error.pop_all()
    return child


def connect(other: Child, engine: Child) -> None:
    """Connect a frontend or the session store and an engine by a new channel; raises OSError."""
    near, far = pair()
    with near, far:
        other.attach(near)
        engine.attach(far, store=other.role == STORE)


@contextmanager
def pinned(cores: Set[int] | None) -> Iterator[None]:
    """Start processes on these cores within the context. They inherit the affinity of this thread, and so do all of their threads."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # the container may have lost these cores since the start
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
