"""The sign of life that an engine shows its supervisor."""

from __future__ import annotations

import subprocess
import sys
import time

from service.ipc.heartbeat import PATIENCE_SECONDS, Heartbeat

BEATS = """
import sys
from service.ipc.heartbeat import Heartbeat
heartbeat = Heartbeat(int(sys.argv[1]))
print("beating", flush=True)
while True:
    heartbeat.beat(60.0)
"""


def test_a_pulse_is_due_after_what_was_announced() -> None:
    heartbeat = Heartbeat()
    for announced in (PATIENCE_SECONDS, 60.0):
        heartbeat.beat(announced)
        assert -announced <= heartbeat.late_seconds() < 1 - announced
    heartbeat.beat(-5.0)
    assert 5 <= heartbeat.late_seconds() < 6
    heartbeat.close()


def test_a_process_that_beats_without_pause_is_never_seen_late() -> None:
    """What is read while the other process writes is the moment before or after, and nothing between."""
    heartbeat = Heartbeat()
    heartbeat.beat(60.0)
    command = [sys.executable, "-c", BEATS, str(heartbeat.descriptor)]
    with subprocess.Popen(command, pass_fds=[heartbeat.descriptor], stdout=subprocess.PIPE, text=True) as beating:
        assert beating.stdout is not None and beating.stdout.readline() == "beating\n"
        until = time.monotonic() + 0.5
        latest = max(heartbeat.late_seconds() for _ in iter(lambda: time.monotonic() < until, False))
        beating.kill()
    assert latest < 0
    heartbeat.close()
