"""No bytes from a client make a parser take long, or break a running service: fuzzing guided by coverage, and 100,000 mutated requests.

`python -m tests.long.fuzz.wire` sends more.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.long import scaled
from tests.long.fuzz.targets import TARGETS
from tests.long.fuzz.wire import fuzzed

SECONDS, REQUESTS = 8, scaled(100_000)
"""How long each parser is fuzzed, and the requests to a service."""


@pytest.mark.parametrize("target", TARGETS)
def test_no_bytes_break_a_parser(target: str, tmp_path: Path) -> None:
    """Nothing but the error for the client is raised."""
    pytest.importorskip("atheris")
    command = [sys.executable, "-m", "tests.long.fuzz", target, str(SECONDS), str(tmp_path)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert run.returncode == 0 and "Done " in run.stdout, run.stdout[-4000:]


def test_mutated_requests_get_valid_replies_and_leave_nothing(tmp_path: Path, show: Callable[[object], None]) -> None:
    with fuzzed(tmp_path) as fuzzer:
        fuzzer.run(REQUESTS)
    show(fuzzer.account)
    assert not fuzzer.account.faults
