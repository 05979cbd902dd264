"""A thread beside the serving one: what it makes, and what it has that one do."""

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


def readable(one: HasFileno) -> None:
    """Wait until there is something to settle."""
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ)
        assert selector.select(10)


def settled(loader: LoaderThread[int]) -> None:
    """Wait for that, and do it."""
    readable(loader)
    loader.settle()


def test_work_is_done_in_another_thread_and_heard_of_in_this_one() -> None:
    loader, heard = LoaderThread[int](), list[tuple[int, int]]()

    def done(future: Future[int]) -> None:
        heard.append((future.result(), threading.get_ident()))

    loader.begin(threading.get_ident, done)
    assert not heard
    settled(loader)
    [(there, here)] = heard
    assert here == threading.get_ident() != there


def test_pieces_of_work_are_done_one_after_the_other() -> None:
    loader, heard = LoaderThread[int](), list[int]()
    for number in range(5):
        loader.begin(lambda number=number: number, lambda future: heard.append(future.result()))  # type: ignore[misc]
    while len(heard) < 5:
        settled(loader)
    assert heard == list(range(5))


def test_what_is_raised_is_heard_of() -> None:
    loader, heard = LoaderThread[int](), list[BaseException | None]()

    def fail() -> int:
        raise ValueError("broken")

    loader.begin(fail, lambda future: heard.append(future.exception()))
    settled(loader)
    assert isinstance(heard[0], ValueError)
    loader.begin(lambda: 1, lambda future: heard.append(future.exception()))
    settled(loader)
    assert heard[1] is None, "it goes on after that"


def test_what_failed_work_had_made_is_gone_once_that_was_heard_of() -> None:
    loader, made, heard = LoaderThread[int](), list[weakref.ref[set[int]]](), list[str]()

    def fail() -> int:
        half_made = {1, 2, 3}
        made.append(weakref.ref(half_made))
        raise ValueError("broken")

    gc.disable()
    try:
        loader.begin(fail, lambda future: heard.append(str(future.exception())))
        settled(loader)
        assert heard == ["broken"]
        # The other thread lets go of it after it has told.
        eventually(lambda: made[0]() is None, within_seconds=5)
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_the_other_thread_has_something_done_between_turns(fails: bool) -> None:
    loader, heard, ran_in = LoaderThread[int](), list[Future[int]](), list[int]()

    def here() -> None:
        ran_in.append(threading.get_ident())
        if fails:
            raise ValueError("broken")

    def work() -> int:
        loader.between_batches(here)
        return 7

    loader.begin(work, heard.append)
    while not heard:
        settled(loader)
    assert ran_in == [threading.get_ident()]
    assert isinstance(heard[0].exception(), ValueError) if fails else heard[0].result() == 7


def test_the_serving_thread_gets_python_back_sooner_while_something_is_made() -> None:
    loader, usual = LoaderThread[float](), sys.getswitchinterval()
    heard: list[float] = []
    loader.begin(sys.getswitchinterval, lambda future: heard.append(future.result()))
    while not heard:
        readable(loader)
        loader.settle()
    assert heard == [pytest.approx(SWITCH_SECONDS)]
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_there_is_nothing_to_settle_where_nothing_was_begun() -> None:
    LoaderThread[int]().settle()
