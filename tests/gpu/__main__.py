"""`python -m tests.gpu [PYTEST ARGUMENTS]` runs the tests of this folder and, when all passed, records for which kernels and where.

`python -m tests.gpu --stale` runs nothing and says on stderr when the record is missing or is of other kernels.
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


class Counts:
    """A plugin of pytest: how many tests passed and how many were skipped, as its last line says."""

    passed = 0
    skipped = 0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self.passed, self.skipped = (len(terminalreporter.getreports(outcome)) for outcome in ("passed", "skipped"))


def main(arguments: Sequence[str], tests: Path = HERE, kernels: Path = KERNELS, record: Path = PASSED) -> int:
    """Exit status: pytest's, or 0 where it does not run."""
    if list(arguments) != ["--stale"]:
        return _run(arguments, tests, kernels, record)
    said = warning(record, kernels)
    if said is not None:
        print(said, file=sys.stderr)
    return 0


def _run(arguments: Sequence[str], tests: Path, kernels: Path, record: Path) -> int:
    # Before the tests: of a kernel that is edited while they run, nobody knows which text has passed.
    tested, counts = kernels_hash(kernels), Counts()
    status = pytest.main([str(tests), *arguments], plugins=[counts])
    # Arguments may select a few tests only, and a part proves nothing; nor do tests that were all skipped.
    partial = bool(arguments or os.environ.get("PYTEST_ADDOPTS"))
    if status == pytest.ExitCode.OK and counts.passed and not partial:
        found = {"kernels": tested, **_where(), "passed": counts.passed, "skipped": counts.skipped}
        record.write_text(f"{json.dumps(found, indent=2)}\n")
        print(f"written to {record}")
    return int(status)


def _where() -> dict[str, object]:
    import torch  # takes seconds to load, and --stale does without

    versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    with suppress(PackageNotFoundError):
        versions["cupy"] = version("cupy-cuda13x")
    return {"device": torch.cuda.get_device_name(), "date": date.today().isoformat(), "versions": versions}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
