"""Runs jobs in generator processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import structs

from loadtest.discovery import CannotMeasure
from loadtest.generator.job import Job, Result

MARGIN_SECONDS = 60.0
"""Time beyond a job's own duration after which a generator that has not finished is ended."""
IMPORTABLE = str(Path(__file__).parents[2])
"""The folder of the package `loadtest`. The wheel has it inside `service`, where Python would not find it."""


def divided(job: Job, generators: int) -> list[Job]:
    """Divide the load of a job among generators, which need a caller each."""
    count = min(generators, job.callers)
    callers = [job.callers // count + (number < job.callers % count) for number in range(count)]
    return [
        structs.replace(job, callers=each, rate=job.rate / count, seed=job.seed + number) for number, each in enumerate(callers)
    ]


def run_in_processes(jobs: Sequence[Job]) -> Result:
    """Run jobs on one server at the same time, each in its own generator process, and return the result of all of them."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return merged(list(pool.map(run_in_process, jobs)))


def merged(results: Sequence[Result]) -> Result:
    """Return the result of loads that ran at the same time. Each has measured the processor time of the same server."""
    failures: Counter[str] = Counter()
    for result in results:
        failures.update(result.failures)
    return Result(
        seconds=fmean(result.seconds for result in results),
        due=sum(result.due for result in results),
        answers=sum(result.answers for result in results),
        latencies=b"".join(result.latencies for result in results),
        delays=b"".join(result.delays for result in results),
        failures=dict(failures),
        cpu_seconds=sum(result.cpu_seconds for result in results),
        server_cpu_seconds=[fmean(times) for times in zip(*(result.server_cpu_seconds for result in results), strict=True)],
    )


def run_in_process(job: Job) -> Result:
    """Run a job in a new generator process. Raises CannotMeasure when the process fails."""
    limit = job.warm_up + job.seconds + job.grace + MARGIN_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder) / "job", Path(folder) / "result"
        source.write_bytes(msgspec.msgpack.encode(job))
        command = (sys.executable, "-m", "loadtest.generator", str(source), str(destination))
        folders = os.pathsep.join(filter(None, (IMPORTABLE, os.environ.get("PYTHONPATH"))))
        try:
            completed = subprocess.run(command, capture_output=True, timeout=limit, env=os.environ | {"PYTHONPATH": folders})
        except subprocess.TimeoutExpired as error:
            raise CannotMeasure(f"the load generator did not finish within {limit:g} s") from error
        if completed.returncode:
            raise CannotMeasure(f"the load generator failed: {completed.stderr.decode(errors='replace').strip()[-2000:]}")
        return msgspec.msgpack.decode(destination.read_bytes(), type=Result)
