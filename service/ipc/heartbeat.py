"""Heartbeats: each child process writes one shared page, which the supervisor reads."""

from __future__ import annotations

import asyncio
import mmap
import os
import time

from service.ipc.shared_file import create_shared_file

IDLE_SECONDS = 0.5
"""An idle process beats at least this often."""
PATIENCE_SECONDS = 3.0
"""Default time until an engine's next beat is due: long enough for a process that waits for a busy processor."""
FRONTEND_PATIENCE_SECONDS = 10.0
"""Time until a frontend's next beat is due: reading a large tokenizer may occupy its interpreter for seconds."""


class Heartbeat:
    """A page of shared memory with the time, on the machine's monotonic clock, at which the next beat is due.

    A beat is one store: a frame would cost the engine a write for each batch and wake the supervisor.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """descriptor: the page that this process inherited; None creates a page."""
        self.descriptor = create_shared_file("seqserve-heartbeat", mmap.PAGESIZE) if descriptor is None else descriptor
        try:
            self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        except OSError:
            os.close(self.descriptor)
            raise
        # One store and one load: struct.pack_into writes zeros first, which the supervisor could read as long overdue.
        self._due = memoryview(self._page).cast("d")

    def beat(self, next_seconds: float = PATIENCE_SECONDS) -> None:
        """Beat now; the next beat is due within `next_seconds`."""
        self.beat_by(time.monotonic() + next_seconds)

    def beat_by(self, due: float) -> None:
        """Beat now; the next beat is due at `due`, on the machine's monotonic clock."""
        self._due[0] = due

    def beat_from_loop(self) -> None:
        """Beat now and then from a timer of the running event loop: a loop that stands still misses its beats."""
        self.beat(FRONTEND_PATIENCE_SECONDS)
        asyncio.get_running_loop().call_later(IDLE_SECONDS, self.beat_from_loop)

    def late_seconds(self) -> float:
        """Return how long the next beat is overdue; negative while it is not."""
        return time.monotonic() - self._due[0]

    def close(self) -> None:
        self._due.release()
        self._page.close()
        os.close(self.descriptor)
