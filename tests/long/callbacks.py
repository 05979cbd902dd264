"""Measures the callbacks of event loops in this process."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import pytest

MAX_CALLBACK_SECONDS = 0.010
"""No request may occupy the event loop for longer. This is processor time: another process may always delay a callback."""
ATTEMPTS = 3
T = TypeVar("T")


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


def with_short_callbacks(measure: Callable[[], tuple[T, Callbacks]]) -> T:
    """Return a result that comes without a long callback.

    A long callback is measured again: with cold caches, as after another process had the core, it takes more processor time.
    """
    for _ in range(ATTEMPTS):
        result, callbacks = measure()
        if callbacks.longest_seconds < MAX_CALLBACK_SECONDS:
            return result
    raise AssertionError(f"a callback took {callbacks.longest_seconds:.3f} s of processor time: {callbacks.longest}")
