"""The loader thread: jobs that it runs, and calls that it makes in the serving thread."""

from __future__ import annotations

import gc
import selectors
import sys
import threading
import weakref
from concurrent.futures import Future
from typing import Protocol

import pytest

from service.engine.loader_thread import SWITCH_SECONDS, LoaderThread
from tests.serving import eventually


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait_until_readable(source: HasFileno) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        assert selector.select(10)


def settle(loader: LoaderThread[int]) -> None:
    wait_until_readable(loader)
    loader.settle()


def test_job_runs_in_another_thread_and_reports_to_this_one() -> None:
    loader, reported = LoaderThread[int](), list[tuple[int, int]]()

    def on_done(future: Future[int]) -> None:
        reported.append((future.result(), threading.get_ident()))

    loader.begin(threading.get_ident, on_done)
    assert not reported
    settle(loader)
    [(job_thread, report_thread)] = reported
    assert report_thread == threading.get_ident() != job_thread


def test_jobs_run_in_order() -> None:
    loader, reported = LoaderThread[int](), list[int]()
    for number in range(5):
        loader.begin(lambda number=number: number, lambda future: reported.append(future.result()))  # type: ignore[misc]
    while len(reported) < 5:
        settle(loader)
    assert reported == list(range(5))


def test_error_of_a_job_is_reported_and_the_next_job_runs() -> None:
    loader, reported = LoaderThread[int](), list[BaseException | None]()

    def fail() -> int:
        raise ValueError("broken")

    loader.begin(fail, lambda future: reported.append(future.exception()))
    settle(loader)
    assert isinstance(reported[0], ValueError)
    loader.begin(lambda: 1, lambda future: reported.append(future.exception()))
    settle(loader)
    assert reported[1] is None


def test_failed_job_leaves_nothing_alive_once_reported() -> None:
    loader, made, reported = LoaderThread[int](), list[weakref.ref[set[int]]](), list[str]()

    def fail() -> int:
        half_made = {1, 2, 3}
        made.append(weakref.ref(half_made))
        raise ValueError("broken")

    gc.disable()
    try:
        loader.begin(fail, lambda future: reported.append(str(future.exception())))
        settle(loader)
        assert reported == ["broken"]
        # The loader thread drops its references after it has reported.
        eventually(lambda: made[0]() is None, within_seconds=5)
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_job_runs_work_in_the_serving_thread(fails: bool) -> None:
    loader, reported, ran_in = LoaderThread[int](), list[Future[int]](), list[int]()

    def work() -> None:
        ran_in.append(threading.get_ident())
        if fails:
            raise ValueError("broken")

    def job() -> int:
        loader.between_batches(work)
        return 7

    loader.begin(job, reported.append)
    while not reported:
        settle(loader)
    assert ran_in == [threading.get_ident()]
    assert isinstance(reported[0].exception(), ValueError) if fails else reported[0].result() == 7


def test_switch_interval_is_short_only_while_a_job_runs() -> None:
    loader, usual = LoaderThread[float](), sys.getswitchinterval()
    reported: list[float] = []
    loader.begin(sys.getswitchinterval, lambda future: reported.append(future.result()))
    while not reported:
        wait_until_readable(loader)
        loader.settle()
    assert reported == [pytest.approx(SWITCH_SECONDS)]
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_settle_without_jobs_does_nothing() -> None:
    LoaderThread[int]().settle()
