"""Measures the callbacks of event loops in this process."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

MAX_CALLBACK_SECONDS = 0.010
"""No request may occupy the event loop for longer. This is processor time: another process may always delay a callback."""


@dataclass
class Callbacks:
    """The longest callback so far, in processor time of its thread, and the processor time of all."""

    longest_seconds: float = 0.0
    longest: asyncio.Handle | None = None
    total_seconds: float = 0.0


@contextmanager
def measured_callbacks() -> Iterator[Callbacks]:
    """Measure the callbacks of asyncio's own loops that run within this context."""
    callbacks, run = Callbacks(), asyncio.Handle._run

    def measure(handle: asyncio.Handle) -> None:
        start = time.thread_time()
        run(handle)
        seconds = time.thread_time() - start
        if seconds > callbacks.longest_seconds:
            callbacks.longest_seconds, callbacks.longest = seconds, handle
        callbacks.total_seconds += seconds

    gc.collect()
    gc.freeze()  # as in the service: otherwise a collection visits all objects of all tests
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", measure)
            yield callbacks
    finally:
        gc.unfreeze()
