"""A child process ends with its supervisor, and shows it heartbeats."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from service.ipc import process_config
from service.ipc.heartbeat import FRONTEND_PATIENCE_SECONDS, IDLE_SECONDS, PATIENCE_SECONDS, Heartbeat
from tests.serving import alive, eventually

SUPERVISOR = """
import os, subprocess, sys, time
from service.ipc.channel import pair
near, far = pair()
command = [sys.executable, "-c", sys.argv[1], str(os.getpid()), str(far.fileno())]
print(subprocess.Popen(command, pass_fds=[far.fileno()]).pid, flush=True)
far.close()
time.sleep(600)
"""
CHILD = """
import sys, time
from service.ipc import process_config
{patch}
process_config._die_with(int(sys.argv[1]), int(sys.argv[2]))
print("bound", flush=True)
time.sleep(600)
"""
WITHOUT_DEATH_SIGNAL = "process_config._request_death_signal = lambda: False"


@pytest.mark.parametrize("patch", ["", WITHOUT_DEATH_SIGNAL], ids=["death signal", "end of file"])
def test_child_ends_with_its_supervisor(patch: str) -> None:
    command = [sys.executable, "-c", SUPERVISOR, CHILD.format(patch=patch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert supervisor.stdout.readline() == "bound\n"
        assert alive(child)
        supervisor.kill()
        eventually(lambda: not alive(child), 30)


BEATS = """
import sys
from service.ipc.heartbeat import Heartbeat
heartbeat = Heartbeat(int(sys.argv[1]))
print("beating", flush=True)
while True:
    heartbeat.beat(60.0)
"""


def test_heartbeat_is_due_when_the_last_one_said() -> None:
    heartbeat = Heartbeat()
    for seconds in (PATIENCE_SECONDS, 60.0):
        heartbeat.beat(seconds)
        assert -seconds <= heartbeat.late_seconds() < 1 - seconds
    heartbeat.beat(-5.0)
    assert 5 <= heartbeat.late_seconds() < 6
    heartbeat.close()


def test_process_that_beats_without_pause_is_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it writes, the supervisor reads the old or the new time, never a mixture. An unlinked temporary file is shared as well."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    heartbeat = Heartbeat()
    heartbeat.beat(60.0)
    command = [sys.executable, "-c", BEATS, str(heartbeat.descriptor)]
    with subprocess.Popen(command, pass_fds=[heartbeat.descriptor], stdout=subprocess.PIPE, text=True) as beating:
        assert beating.stdout is not None and beating.stdout.readline() == "beating\n"
        latest = max(heartbeat.late_seconds() for _ in range(100_000))
        beating.kill()
    assert latest < 0
    heartbeat.close()


def test_event_loop_beats_as_long_as_it_runs() -> None:
    heartbeat = Heartbeat()

    async def run() -> None:
        heartbeat.beat_from_loop()
        heartbeat.beat(-5.0)  # overwritten by the next beat of the timer
        while heartbeat.late_seconds() > 0:
            await asyncio.sleep(IDLE_SECONDS / 10)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert -FRONTEND_PATIENCE_SECONDS <= heartbeat.late_seconds() < 0
    heartbeat.close()


def test_huge_pages_hold_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[range] = []
    monkeypatch.setattr(process_config, "LARGEST_COLLAPSED_BYTES", 1 << 62)
    collapse = SimpleNamespace(madvise=lambda begin, size, _: moved.append(range(begin.value, begin.value + size.value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: collapse)
    process_config.use_huge_pages()
    assert any(id(moved) in each for each in moved)
