"""The wall clock jumps by an hour and by a year, forwards and back: no session, deadline or process notices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests import models
from tests.accumulator import Account
from tests.long.environment import compiled
from tests.serving import Server, answering, eventually, serving
from tests.steady import processes

HOUR, YEAR = 3600, 365 * 86_400
JUMPS = (HOUR, 0, -HOUR, YEAR, -YEAR, 0)
"""Seconds that the wall clock is ahead, in sequence."""
PAUSE_SECONDS = 2.5
"""Between two jumps: longer than the supervisor waits for a heartbeat."""
IDLE_SECONDS = 5.0
REQUEST = {"model": "accumulator", "inputs": [[2, 2, 0]], "deadline_ms": 30_000}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("wall_clock.c", tmp_path_factory.mktemp("shim"))


@contextmanager
def jumping(shim: Path, scratch: Path, **settings: str) -> Iterator[tuple[Server, Path]]:
    """Run a server whose wall clock is ahead by the time in the yielded file."""
    jump = scratch / "jump"
    jump.write_text("0")
    models.accumulator(scratch / "models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(shim))
        patch.setenv("CLOCK_JUMP", str(jump))
        server = serving(scratch / "models", scratch, **settings)
        running = server.__enter__()
    try:
        yield running, jump
    finally:
        server.__exit__(None, None, None)


def jump_with_a_session(server: Server, jump: Path, jumps: Sequence[int]) -> list[str]:
    """Let the clock jump while a session continues. Returns the faults."""
    before, faults = processes(server), []
    assert server.infer("accumulator", [[2]], session="kept").status_code == 200
    for steps, seconds in enumerate(jumps, start=2):
        jump.write_text(str(seconds))
        time.sleep(PAUSE_SECONDS)
        reply = server.infer("accumulator", [[2]], session="kept", start=False)
        if reply.status_code != 200 or Account.told(reply.json()["outputs"][0]["value"]) != Account(steps, steps):
            faults.append(f"ahead by {seconds} s: {reply.text}")
            break
    if processes(server) != before:
        faults.append("a process was replaced")
    return faults


def test_jumps_of_the_wall_clock_change_nothing(shim: Path, tmp_path: Path) -> None:
    with jumping(shim, tmp_path, session_idle_seconds="60") as (server, jump):
        with answering(server, REQUEST):
            assert jump_with_a_session(server, jump, JUMPS) == []
        jump.write_text(str(YEAR))
        assert server.infer("accumulator", [[2]]).status_code == 200
        ahead = server.metric("seqserve_last_answer_time_seconds") - datetime.now(UTC).timestamp()
        assert abs(ahead - YEAR) < HOUR, "the service has seen the jumps"


def test_session_expires_by_the_time_that_passes(shim: Path, tmp_path: Path) -> None:
    """Not sooner after a jump ahead, and not later after a jump back."""
    with jumping(shim, tmp_path, session_idle_seconds=str(IDLE_SECONDS)) as (server, jump):
        for name, seconds in (("ahead", YEAR), ("back", -YEAR)):
            began = time.monotonic()
            assert server.infer("accumulator", [[2]], session=name).status_code == 200
            jump.write_text(str(seconds))
            eventually(lambda: server.metric("seqserve_sessions") == 0)
            assert time.monotonic() - began >= IDLE_SECONDS - 0.1, name
