"""Run tests as on another machine: `python -m tests.anywhere [--uptime SECONDS] [--burn] [PYTEST ARGUMENTS]`.

With --uptime, the monotonic clock of the tests and their child processes starts at SECONDS.
With --burn, a process computes on every core while the tests run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.planted import PLANTED_PATH

BURN = "while True: pass"


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.anywhere")
    parser.add_argument("--uptime", type=float, metavar="SECONDS", help="what time.monotonic() reads at the start")
    parser.add_argument("--burn", action="store_true", help="keep every core busy")
    options, rest = parser.parse_known_args(arguments)
    variables = dict(os.environ)
    if options.uptime is not None:
        variables["MONOTONIC_SHIFT"] = str(options.uptime - time.monotonic())
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [PLANTED_PATH, os.environ.get("PYTHONPATH")]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(cores if options.burn else 0)]
    try:
        return subprocess.run([sys.executable, "-m", "pytest", *rest], env=variables).returncode
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
