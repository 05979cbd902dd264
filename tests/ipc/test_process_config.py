"""A child process ends with its supervisor."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
