"""The last passed runs of the test files that `make test` leaves out: date, commit, machine and numbers of tests, in tiers.json.

`python -m tests.tiers TIER [FILE...]` runs a tier, or some of its files, and records each file that passed.
`python -m tests.tiers --stale` runs nothing and prints a warning for each tier with a file that has not passed for a week.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORD = HERE / "tiers.json"
TIERS = {"long": "make test-long", "docker": "make docker-test", "cluster": "make cluster-test"}
GPU_RECORD = HERE / "gpu" / "passed.json"
MAX_AGE = timedelta(days=7)


@dataclass(frozen=True)
class Proof:
    """A run of one test file that passed. commit: with a "+" if the working tree differed from it."""

    date: str
    commit: str
    machine: str
    passed: int
    skipped: int


def main(arguments: Sequence[str], record: Path = RECORD, gpu_record: Path = GPU_RECORD, today: date | None = None) -> int:
    """Return the exit status: 0 if all files passed, and with --stale always."""
    today = today or date.today()
    if list(arguments) == ["--stale"]:
        for warning in warnings(record, gpu_record, today):
            print(warning, file=sys.stderr)
        return 0
    tier, *names = arguments
    files = [Path(name).resolve() for name in names] or files_of(tier)
    failed = [file.name for file in files if not _run(file, record, today)]
    if failed:
        print(f"{len(failed)} of {len(files)} files failed: {' '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def files_of(tier: str) -> list[Path]:
    return sorted((HERE / tier).glob("test_*.py"))


def warnings(record: Path, gpu_record: Path, today: date) -> list[str]:
    """Return one line for each tier that has files without a record, or with a record older than a week."""
    proofs, lines = _read(record), []
    for tier, command in TIERS.items():
        dates = {file.name: _date(proofs.get(_key(file))) for file in files_of(tier)}
        lines += _warnings(f"tests/{tier}", command, dates, today)
    return lines + _warnings("tests/gpu", "make test-gpu", {"": _date(_read(gpu_record))}, today)


def _warnings(tier: str, command: str, dates: Mapping[str, date | None], today: date) -> list[str]:
    old = {file: passed for file, passed in dates.items() if passed is None or today - passed > MAX_AGE}
    if not old:
        return []
    names = f" in {' '.join(old)}" if 0 < len(old) < len(dates) else ""
    oldest = min((passed for passed in old.values() if passed is not None), default=None)
    if oldest is None:
        return [f"warning: no record that {tier} passed{names}: run `{command}`"]
    return [f"warning: {tier} last passed on {oldest}, more than a week ago{names}: run `{command}`"]


def _run(file: Path, record: Path, today: date) -> bool:
    """Run the tests of a file, and record them if they passed. A run that skips every test does not count."""
    commit = _commit()  # before the run: the tree may change while it lasts
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run([sys.executable, "-m", "pytest", "-rs", str(file), f"--junitxml={report}"]).returncode
        passed, skipped = _counts(report) if status == 0 else (0, 0)
    if passed:
        proof = Proof(today.isoformat(), commit, _machine(), passed, skipped)
        record.write_text(json.dumps(_read(record) | {_key(file): asdict(proof)}, indent=2, sort_keys=True) + "\n")
    return status == 0


def _counts(report: Path) -> tuple[int, int]:
    """Return the numbers of passed and of skipped tests in pytest's report of a run without failures."""
    suites = list(ElementTree.parse(report).iter("testsuite"))
    tests, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped"))
    return tests - skipped, skipped


def _commit() -> str:
    """Return the commit of the working tree. A changed record of earlier runs does not count as a change of the tree."""
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", f":!{RECORD.relative_to(ROOT)}")
    return f"{head}+" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _machine() -> str:
    import torch  # takes seconds to load, and --stale does not need it

    from kernels.device_name import device_name

    return device_name(torch.device("cpu"))


def _key(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _read(record: Path) -> dict[str, object]:
    """Return the record, or an empty one if the file is missing or broken by a merge."""
    try:
        content = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _date(proof: object) -> date | None:
    try:
        return date.fromisoformat(str(proof.get("date"))) if isinstance(proof, dict) else None
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
