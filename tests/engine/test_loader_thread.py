"""The loader thread: jobs that it runs, and calls that it makes in the serving thread."""

from __future__ import annotations

import gc
import selectors
import sys
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from service.engine.loader_thread import SWITCH_SECONDS, LoaderThread
from tests.serving import eventually


def wait_until_readable(source: Any) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        assert selector.select(10)


def settle(loader: LoaderThread[int]) -> None:
    wait_until_readable(loader)
    loader.settle()


def test_jobs_run_in_order_in_another_thread_and_report_to_this_one() -> None:
    loader, ran, reported = LoaderThread[int](), list[int](), list[tuple[int, int]]()

    def report(future: Future[int]) -> None:
        reported.append((future.result(), threading.get_ident()))

    for number in range(5):
        loader.begin(lambda number=number: ran.append(threading.get_ident()) or number, report)  # type: ignore[misc,func-returns-value]
    assert not reported
    while len(reported) < 5:
        settle(loader)
    assert reported == [(number, threading.get_ident()) for number in range(5)]
    assert len(set(ran)) == 1 and threading.get_ident() not in ran


def test_failed_job_is_reported_and_leaves_nothing_alive() -> None:
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
        eventually(lambda: made[0]() is None)
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
