"""The sign of life that an engine shows its supervisor."""

from __future__ import annotations

import subprocess
import sys
import time

from service.ipc.process_config import PATIENCE_SECONDS, Pulse

BEATS = """
import sys
from service.ipc.process_config import Pulse
pulse = Pulse(int(sys.argv[1]))
print("beating", flush=True)
while True:
    pulse.beat(60.0)
"""


def test_a_pulse_is_due_after_what_was_announced() -> None:
    pulse = Pulse()
    for announced in (PATIENCE_SECONDS, 60.0):
        pulse.beat(announced)
        assert -announced <= pulse.late_seconds() < 1 - announced
    pulse.beat(-5.0)
    assert 5 <= pulse.late_seconds() < 6
    pulse.close()


def test_a_process_that_beats_without_pause_is_never_seen_late() -> None:
    """What is read while the other process writes is the moment before or after, and nothing between."""
    pulse = Pulse()
    pulse.beat(60.0)
    command = [sys.executable, "-c", BEATS, str(pulse.descriptor)]
    with subprocess.Popen(command, pass_fds=[pulse.descriptor], stdout=subprocess.PIPE, text=True) as beating:
        assert beating.stdout is not None and beating.stdout.readline() == "beating\n"
        until = time.monotonic() + 0.5
        latest = max(pulse.late_seconds() for _ in iter(lambda: time.monotonic() < until, False))
        beating.kill()
    assert latest < 0
    pulse.close()
