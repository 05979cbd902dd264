"""No bytes from a client make a parser take long, or raise anything except the error for that client. See tests/long/fuzz."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.long.fuzz.targets import TARGETS

pytest.importorskip("atheris")
SECONDS = 8
"""How long each parser is fuzzed."""


def fuzz(target: str, seconds: int, folder: Path) -> tuple[int, str]:
    """Return the exit status of the fuzzer, and the end of its output."""
    command = [sys.executable, "-m", "tests.long.fuzz", target, str(seconds), str(folder)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return run.returncode, run.stdout[-4000:]


@pytest.mark.parametrize("target", TARGETS)
def test_no_bytes_break_a_parser(target: str, tmp_path: Path) -> None:
    status, output = fuzz(target, SECONDS, tmp_path)
    assert status == 0, output
    assert "Done " in output
