"""A timer with a resolution of microseconds: the event loop's own timers count milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)


class Timer:
    """Calls back once at a time of the monotonic clock, through the event loop."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._expired)
        self._callback = callback

    def set(self, at: float) -> None:
        """Expire at `at`, or immediately if it is past."""
        nanoseconds = max(1, int(1e9 * (at - time.monotonic())))  # 0 would disarm the timer
        _libc.timerfd_settime(self._fd, 0, struct.pack("@4l", 0, 0, *divmod(nanoseconds, 10**9)), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _expired(self) -> None:
        os.read(self._fd, 8)
        self._callback()
