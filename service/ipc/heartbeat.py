"""A child process's sign of life: one shared page that it writes and the supervisor reads."""

from __future__ import annotations

import mmap
import os
import time

IDLE_SECONDS = 0.5
"""An idle process beats at least this often."""
PATIENCE_SECONDS = 2.0
"""Default time until the next beat is due."""


class Heartbeat:
    """One page of shared memory: the moment, on the machine's monotonic clock, by which the next sign of life is due.

    A page costs the engine nothing per turn, where a frame would cost a write and wake the supervisor.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("seqserve-pulse") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        # One store and one load: struct.pack_into writes zeros first, which the other side may read as long overdue.
        self._due = memoryview(self._page).cast("d")

    def beat(self, next_seconds: float = PATIENCE_SECONDS) -> None:
        """Alive now; the next beat comes within `next_seconds`."""
        self.beat_by(time.monotonic() + next_seconds)

    def beat_by(self, moment: float) -> None:
        """Alive until then at least, on the machine's monotonic clock."""
        self._due[0] = moment

    def late_seconds(self) -> float:
        """How long the next sign of life is overdue; negative while it is not."""
        return time.monotonic() - self._due[0]

    def close(self) -> None:
        self._due.release()
        self._page.close()
        os.close(self.descriptor)
