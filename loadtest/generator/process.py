"""Runs jobs in generator processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from loadtest.discovery import CannotMeasure
from loadtest.generator.job import Job, Result

MARGIN_SECONDS = 60.0
"""Time beyond a job's own duration after which a generator that has not finished is ended."""


def run_in_process(job: Job) -> Result:
    """Run a job in a new generator process. Raises CannotMeasure when the process fails."""
    limit = job.warm_up + job.seconds + MARGIN_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder) / "job", Path(folder) / "result"
        source.write_bytes(msgspec.msgpack.encode(job))
        command = (sys.executable, "-m", "loadtest.generator", str(source), str(destination))
        try:
            completed = subprocess.run(command, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired as error:
            raise CannotMeasure(f"the load generator did not finish within {limit:g} s") from error
        if completed.returncode:
            raise CannotMeasure(f"the load generator failed: {completed.stderr.decode(errors='replace').strip()[-2000:]}")
        return msgspec.msgpack.decode(destination.read_bytes(), type=Result)
