"""Turns of frontends to run a suspect in an engine, each frontend in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from service.ipc.suspect_turns import SuspectTurns

ENGINE, OTHER_ENGINE = 0, 1
PROGRAM = """
import sys
from service.ipc.suspect_turns import SuspectTurns
turns = SuspectTurns(int(sys.argv[1]))
for line in sys.stdin:
    method, place = line.split()
    print(getattr(turns, method)(int(place)), flush=True)
"""


class Frontend:
    """A process that takes turns on command."""

    def __init__(self, turns: SuspectTurns) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(turns.descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[turns.descriptor],
        )

    def take(self, place: int = ENGINE) -> bool:
        return self._call("take", place) == "True"

    def give_back(self, place: int = ENGINE) -> None:
        self._call("give_back", place)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _call(self, method: str, place: int) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(method, place, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()


@pytest.fixture
def frontends() -> Iterator[list[Frontend]]:
    turns = SuspectTurns.create()
    frontends = [Frontend(turns) for _ in range(3)]
    yield frontends
    for frontend in frontends:
        frontend.end()
    os.close(turns.descriptor)


def test_frontend_that_asked_first_is_next(frontends: list[Frontend]) -> None:
    first, second, third = frontends
    assert first.take()
    assert first.take(), "it has the turn already"
    assert not second.take() and not third.take()
    assert third.take(OTHER_ENGINE)
    assert SuspectTurns(-1).take(ENGINE), "a single frontend never waits"
    first.give_back()
    assert not first.take() and not third.take(), "it is the turn of the second"
    assert second.take()
    assert not third.take()
    second.give_back()
    assert third.take()
    assert not first.take(OTHER_ENGINE), "the third still has that turn"


@pytest.mark.parametrize("ends", [False, True])
def test_frontend_that_gives_up_or_ends_leaves_its_place(frontends: list[Frontend], ends: bool) -> None:
    first, second, third = frontends
    assert first.take()
    assert not second.take()
    for frontend in (second, first):
        if ends:
            frontend.end()
        else:
            frontend.give_back()
    assert third.take()
