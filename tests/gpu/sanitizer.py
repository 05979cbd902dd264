"""Runs a module under compute-sanitizer, which checks every memory access of its kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys

TOOLS = ("memcheck", "racecheck")


def assert_no_findings(tool: str, module: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", module]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout or "0 hazards displayed" in run.stdout, run.stdout[-2000:]
