"""One child process: why it ended, and messages that it does not read."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from service.errors import Unavailable
from service.ipc.channel import Channel, Frame, pair
from service.ipc.messages.control import CollectMetrics, MetricsCollected
from service.ipc.process_config import DEVICE_LOST
from service.supervisor.process import EXIT_SECONDS, Child


def ignore(child: Child, frame: Frame) -> None:
    """Handle no message."""


def run_child(name: str, code: str, test: Callable[[Child], Awaitable[None]]) -> None:
    """Run `test` with a process that executes `code`, where `control` is its end of the control channel."""
    near, far = pair()
    start = f"import os, socket, sys, time; control = socket.socket(fileno={far.fileno()}); {code}"
    process = subprocess.Popen([sys.executable, "-c", start], pass_fds=[far.fileno()])
    far.close()

    async def run() -> None:
        child = Child(name, process, Channel(near), None, ignore)
        try:
            await asyncio.wait_for(test(child), 60)
        finally:
            child.abandon()

    asyncio.run(run())


def reap(name: str, code: str, exit_reason: str = "ended", exit_seconds: float = 60.0) -> tuple[int | None, str]:
    """Return the exit status of a process that closes its control channel, and why it ended."""
    result: tuple[int | None, str] = (None, "")

    async def test(child: Child) -> None:
        nonlocal result
        child.exit_reason = exit_reason
        await child.ended.wait()
        result = await child.reap(exit_seconds), child.exit_reason

    run_child(name, code, test)
    return result


@pytest.mark.parametrize(
    "name, status, exit_reason",
    [("engine-11", DEVICE_LOST, "device_lost"), ("engine-0", 1, "ended"), ("frontend-0", DEVICE_LOST, "ended")],
)
def test_exit_status_of_an_engine_reports_a_lost_device(name: str, status: int, exit_reason: str) -> None:
    """It may still be exiting when it closes the channel."""
    assert reap(name, f"control.close(); time.sleep(0.1); os._exit({status})") == (status, exit_reason)


def test_process_that_does_not_exit_is_killed() -> None:
    status, exit_reason = reap("engine-0", "control.close(); time.sleep(600)", "failed", exit_seconds=EXIT_SECONDS)
    assert status is not None and status < 0
    assert exit_reason == "failed", "the reason that was known is kept"


def test_call_fails_when_the_process_ends() -> None:
    async def test(child: Child) -> None:
        with pytest.raises(Unavailable, match="engine-0 has ended"):
            await child.call(CollectMetrics(), MetricsCollected)
        child.abandon()
        assert child.process.returncode is not None and child.ended.is_set()

    run_child("engine-0", "control.recv(1)", test)
