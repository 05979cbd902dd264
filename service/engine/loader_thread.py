"""Models made ready while others are served: a thread beside the engine's own, which alone launches turns."""

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
"""How long the thread that loads may keep Python from the one that serves; as a rule it is fifty times as long."""
Done = Callable[[Future[T]], None]


class LoaderThread(Generic[T]):
    """Does one piece of work after the other, and has the serving thread hear of each when it calls `settle`.

    Its descriptor is readable when there is something to settle.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._work: SimpleQueue[tuple[Callable[[], T], Future[T], Done[T]]] = SimpleQueue()
        self._ended: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Thread | None = None
        self._open = 0
        self._switch_seconds = sys.getswitchinterval()

    def fileno(self) -> int:
        return self._descriptor

    def begin(self, work: Callable[[], T], done: Done[T]) -> None:
        """Have `work` done in the other thread, and `done` called in this one with what came of it."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="loader", daemon=True)
            self._thread.start()
        self._open += 1
        sys.setswitchinterval(SWITCH_SECONDS)
        self._work.put((work, Future(), done))

    def between_batches(self, work: Callable[[], U]) -> U:
        """From the other thread: have something done in the serving one, and wait until it was; raises what it raises."""
        done = Future[U]()
        self._tell(lambda: _fulfil(done, work))
        return done.result()

    def settle(self) -> None:
        """Hear what has ended, and do what was asked of the serving thread."""
        if self._ended.empty():
            return  # asked before and after each turn: as a rule there is nothing, and no system call is needed to see that
        try:
            told = os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return
        for _ in range(told):
            self._ended.get()()

    def _run(self) -> None:
        while True:
            work, future, done = self._work.get()
            _fulfil(future, work)
            self._tell(lambda future=future, done=done: self._end(future, done))  # type: ignore[misc]
            # What was made is the serving thread's now: kept here, it would outlive its service.
            del work, future, done

    def _end(self, future: Future[T], done: Done[T]) -> None:
        self._open -= 1
        if not self._open:
            sys.setswitchinterval(self._switch_seconds)
        done(future)

    def _tell(self, word: Callable[[], None]) -> None:
        self._ended.put(word)
        os.eventfd_write(self._descriptor, 1)


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as fault:
        future.set_exception(fault)
        # The fault holds this frame: if that held the future, what was half made would stay until garbage is collected.
        del future
