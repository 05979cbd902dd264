"""Saves checkpoints in a thread, in the order of each session. A waiting state is replaced by a newer state of its session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from service.ipc.messages import DropCheckpoint, SaveCheckpoint
from service.log import Log
from service.metrics import Metrics
from service.mover.checkpoint_store import Checkpoint, Store, StoreFailed, open_store
from service.settings import Settings

SWEEP_SECONDS = 60.0
MAX_WAITING_BYTES = 256 << 20
"""Further states are not saved while this many bytes wait: the store is too slow, or does not answer."""
RETRY_SECONDS = 0.5
Found = Callable[[Checkpoint | None, bool], None]
"""Takes the checkpoint of a session, and whether the store failed."""


class _Waiting(NamedTuple):
    """A save or a removal for a session. checkpoint: None to drop it. since: when it arrived."""

    begun: int
    checkpoint: Checkpoint | None
    since: float


class CheckpointWriter:
    """The only user of the store in this process."""

    def __init__(self, store: Store, metrics: Metrics, log: Log) -> None:
        self._store = store
        self._metrics = metrics
        self._log = log
        self._waiting: dict[str, _Waiting] = {}
        self._bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._lock = asyncio.Lock()
        """One thread uses the store at a time."""
        self._tasks = {asyncio.ensure_future(self._run()), asyncio.ensure_future(self._sweep())}

    def add(self, message: SaveCheckpoint | DropCheckpoint, state: bytes) -> None:
        """Save or drop a checkpoint soon."""
        checkpoint = Checkpoint(message.begun, message.steps, state) if isinstance(message, SaveCheckpoint) else None
        replaced = self._waiting.pop(message.session, None)
        if replaced is not None:
            self._bytes -= _size(replaced)
            if replaced.checkpoint is not None:
                self._metrics.checkpoints.add("skipped")
        if self._bytes + len(state) > MAX_WAITING_BYTES:
            self._metrics.checkpoints.add("failed")
            return
        waiting = self._waiting[message.session] = _Waiting(message.begun, checkpoint, time.monotonic())
        self._bytes += _size(waiting)
        self._idle.clear()
        self._wake.set()

    def find(self, session: str, found: Found) -> None:
        """Call `found` with the checkpoint of a session."""
        task = asyncio.ensure_future(self._find(session, found))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def flush(self) -> None:
        """Wait until every waiting state is saved."""
        await self._idle.wait()

    async def _find(self, session: str, found: Found) -> None:
        async with self._lock:
            waiting = self._waiting.get(session)
            if waiting is not None:
                found(waiting.checkpoint, False)
                return
            try:
                checkpoint = await asyncio.to_thread(self._store.find, session)
            except StoreFailed as error:
                self._log.capped("error", "checkpoint not read", error=str(error))
                found(None, True)
                return
        if checkpoint is not None:
            self._metrics.checkpoints.add("restored")
        found(checkpoint, False)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            async with self._lock:
                batch, self._waiting, self._bytes = self._waiting, {}, 0
                failure = await asyncio.to_thread(self._write, batch)
            now, saved = time.monotonic(), [waiting for waiting in batch.values() if waiting.checkpoint is not None]
            if failure:
                self._log.capped("error", "checkpoints not saved", error=failure)
                self._metrics.checkpoints.add("failed", by=len(saved))
            else:
                self._metrics.checkpoints.add("saved", by=len(saved))
                for waiting in saved:
                    self._metrics.checkpoint_seconds.observe(now - waiting.since)
            if not self._waiting:
                self._idle.set()
            if failure:
                await asyncio.sleep(RETRY_SECONDS)

    def _write(self, batch: dict[str, _Waiting]) -> str:
        """Write in a thread. Returns why that failed, empty if it did not."""
        try:
            for session, waiting in batch.items():
                if waiting.checkpoint is None:
                    self._store.drop(session, waiting.begun)
                else:
                    self._store.save(session, waiting.checkpoint)
        except StoreFailed as error:
            return str(error)
        return ""

    async def _sweep(self) -> None:
        while True:
            async with self._lock:
                try:
                    await asyncio.to_thread(self._store.sweep)
                except StoreFailed as error:
                    self._log.capped("error", "old checkpoints not removed", error=str(error))
            await asyncio.sleep(SWEEP_SECONDS)


def open_writer(settings: Settings, metrics: Metrics, log: Log) -> CheckpointWriter | None:
    """Return the writer to the store of the settings, None without one; raises SettingsError."""
    return CheckpointWriter(open_store(settings), metrics, log) if settings.checkpoints else None


def _size(waiting: _Waiting) -> int:
    return 0 if waiting.checkpoint is None else len(waiting.checkpoint.state)
