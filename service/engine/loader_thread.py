"""A second thread that prepares models while the engine's main thread launches batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")
SWITCH_SECONDS = 1e-4
"""How long the loader thread may hold the interpreter while the serving thread waits for it. Python's default is fifty times as long."""
OnDone = Callable[[Future[T]], None]


class LoaderThread(Generic[T]):
    """Runs jobs in order. The serving thread collects their results with `settle`.

    Its descriptor is readable when `settle` has work.
    """

    def __init__(self) -> None:
        # A pipe with one byte per queued call: only Linux has eventfd.
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        self._jobs: SimpleQueue[tuple[Callable[[], T], Future[T], OnDone[T]]] = SimpleQueue()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """Calls that the serving thread makes in `settle`."""
        self._thread: Thread | None = None
        self._unfinished = 0
        self._switch_seconds = sys.getswitchinterval()

    def fileno(self) -> int:
        return self._readable

    def begin(self, job: Callable[[], T], on_done: OnDone[T]) -> None:
        """Run `job` in the loader thread, then call `on_done` in the serving thread with its future."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="loader", daemon=True)
            self._thread.start()
        self._unfinished += 1
        sys.setswitchinterval(SWITCH_SECONDS)
        self._jobs.put((job, Future(), on_done))

    def between_batches(self, work: Callable[[], U]) -> U:
        """Run `work` in the serving thread and return its result, or raise its error. Called by the loader thread."""
        future = Future[U]()
        self._call(lambda: _fulfil(future, work))
        return future.result()

    def settle(self) -> None:
        """Make the calls that the loader thread has queued."""
        try:
            calls = os.read(self._readable, 4096)
        except BlockingIOError:
            return
        for _ in calls:
            self._calls.get()()

    def _run(self) -> None:
        while True:
            job, future, on_done = self._jobs.get()
            _fulfil(future, job)
            self._call(lambda future=future, on_done=on_done: self._end(future, on_done))  # type: ignore[misc]
            # The result belongs to the serving thread now: a reference here would keep a model alive after its unload.
            del job, future, on_done

    def _end(self, future: Future[T], on_done: OnDone[T]) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            sys.setswitchinterval(self._switch_seconds)
        on_done(future)

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        os.write(self._writable, b"1")


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        # The error references this frame. Without this line the frame would keep the future, and with it a half-made model, until the
        # garbage collector runs.
        del future
