"""`python -m tests.gpu [PYTEST ARGUMENTS]` runs the GPU tests and, if all passed, records the kernels' hash, the device and the versions.

`python -m tests.gpu --stale` runs no test; it prints a warning to stderr if the record is missing or belongs to other kernels.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.gpu.stamp import kernels_hash, warning

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "kernels"
PASSED = HERE / "passed.json"
WORKERS = 4
"""Processes that run tests: most of the time goes to the reference on the CPU."""
ALONE = "test_overload.py"
"""Runs after the other tests: it needs the whole GPU."""


class OutcomeCounts:
    """A pytest plugin that counts passed and skipped tests over several runs."""

    passed = 0
    skipped = 0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self.passed += len(terminalreporter.getreports("passed"))
        self.skipped += len(terminalreporter.getreports("skipped"))


def main(
    arguments: Sequence[str], tests: Path = HERE, kernels: Path = KERNELS, record: Path = PASSED, workers: int = WORKERS
) -> int:
    """Return the exit status: that of pytest, or 0 for --stale. workers: processes that run tests, or 0 to run them in this one."""
    if list(arguments) != ["--stale"]:
        return _run(arguments, tests, kernels, record, workers)
    message = warning(record, kernels)
    if message is not None:
        print(message, file=sys.stderr)
    return 0


def _run(arguments: Sequence[str], tests: Path, kernels: Path, record: Path, workers: int) -> int:
    # Hashed before the tests: a kernel may be edited while they run.
    tested, counts = kernels_hash(kernels), OutcomeCounts()
    status = _pytest(arguments, tests, workers, counts)
    # Arguments may select a few tests only. A partial run proves nothing, and neither does a run that skips every test.
    partial = bool(arguments or os.environ.get("PYTEST_ADDOPTS"))
    if status == pytest.ExitCode.OK and counts.passed and not partial:
        result = {"kernels": tested, **_where(), "passed": counts.passed, "skipped": counts.skipped}
        record.write_text(f"{json.dumps(result, indent=2)}\n")
        print(f"written to {record}")
    return int(status)


def _pytest(arguments: Sequence[str], tests: Path, workers: int, counts: OutcomeCounts) -> int:
    # The tests of a file share servers, so they run in one worker.
    parallel = ["--numprocesses", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    alone = tests / ALONE
    status = pytest.main([str(tests), f"--ignore={alone}", *parallel, *arguments], plugins=[counts])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or not alone.exists():
        return status
    last = pytest.main([str(alone), *arguments], plugins=[counts])
    return status if last == pytest.ExitCode.NO_TESTS_COLLECTED else last


def _where() -> dict[str, object]:
    import torch  # takes seconds to load, and --stale does not need it

    versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    with suppress(PackageNotFoundError):
        versions["cupy"] = version("cupy-cuda13x")
    return {"device": torch.cuda.get_device_name(), "date": date.today().isoformat(), "versions": versions}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
