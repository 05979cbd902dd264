"""Why a process ended, as its supervisor tells it."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from service.ipc.channel import Channel, pair
from service.ipc.process_config import DEVICE_LOST
from service.supervisor.process import Child


def ending(name: str, code: str) -> Child:
    """A process that runs `code` with the other end of its control channel as `control`."""
    mine, theirs = pair()
    start = f"import os, socket, sys, time; control = socket.socket(fileno={theirs.fileno()}); {code}"
    process = subprocess.Popen([sys.executable, "-c", start], pass_fds=[theirs.fileno()])
    theirs.close()
    return Child(name, process, Channel(mine), None)


def read_to_the_end(child: Child) -> None:
    """Wait for its end of the control channel to close."""
    with socket.socket(fileno=socket.dup(child.control.fileno())) as own:
        own.settimeout(20)
        assert own.recv(1) == b""


@pytest.mark.parametrize(
    "name, status, verdict",
    [
        ("engine-0", DEVICE_LOST, "device_lost"),
        ("engine-11", DEVICE_LOST, "device_lost"),
        ("engine-0", 1, "ended"),
        ("frontend-0", DEVICE_LOST, "ended"),
    ],
)
def test_an_engine_s_exit_status_says_that_its_device_was_lost(name: str, status: int, verdict: str) -> None:
    child = ending(name, f"os._exit({status})")
    read_to_the_end(child)
    assert child.reap() == status
    assert child.verdict == verdict


def test_a_process_that_still_tidies_up_says_why_it_ended() -> None:
    child = ending("engine-0", f"control.close(); time.sleep(0.1); sys.exit({DEVICE_LOST})")
    read_to_the_end(child)
    assert child.reap() == DEVICE_LOST
    assert child.verdict == "device_lost"


def test_a_process_that_does_not_end_by_itself_is_ended() -> None:
    child = ending("engine-0", "control.close(); time.sleep(60)")
    read_to_the_end(child)
    assert child.reap() < 0
    assert child.verdict == "ended"


def test_an_engine_that_was_seen_to_hang_or_to_fail_keeps_this_verdict() -> None:
    child = ending("engine-0", f"os._exit({DEVICE_LOST})")
    child.verdict = "failed"
    child.reap()
    assert child.verdict == "failed"
