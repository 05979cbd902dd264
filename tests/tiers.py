"""The date on which each tier of tests that `make test` leaves out last passed.

`python -m tests.tiers TIER [PYTEST ARGUMENTS]` runs a tier. Without arguments it records the date of a run that passed.
`python -m tests.tiers --stale` runs nothing and prints one warning for each tier that has not passed for a week.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORD = HERE / "tiers.json"
TIERS = {"long": "make test-long", "docker": "make docker-test", "cluster": "make cluster-test", "gpu": "make test-gpu"}
GPU_RECORD = HERE / "gpu" / "passed.json"
MAX_AGE = timedelta(days=7)


def main(arguments: Sequence[str], record: Path = RECORD, gpu_record: Path = GPU_RECORD, today: date | None = None) -> int:
    """Return the exit status: that of pytest, or 0 with --stale."""
    today = today or date.today()
    if list(arguments) == ["--stale"]:
        for warning in warnings(record, gpu_record, today):
            print(warning, file=sys.stderr)
        return 0
    tier, *options = arguments
    status = subprocess.run([sys.executable, "-m", "pytest", "-rs", str(HERE / tier), *options]).returncode
    # Options may select a part of the tier, and a part proves nothing about the rest.
    if status == 0 and not options:
        record.write_text(json.dumps(_read(record) | {tier: today.isoformat()}, indent=2, sort_keys=True) + "\n")
    return status


def warnings(record: Path, gpu_record: Path, today: date) -> list[str]:
    """Return one line for each tier that has no record, or one older than a week."""
    passed = _read(record) | {"gpu": _read(gpu_record).get("date")}
    lines = []
    for tier, command in TIERS.items():
        passed_on = _date(passed.get(tier))
        if passed_on is None:
            lines.append(f"warning: no record that tests/{tier} passed: run `{command}`")
        elif today - passed_on > MAX_AGE:
            lines.append(f"warning: tests/{tier} last passed on {passed_on}, more than a week ago: run `{command}`")
    return lines


def _read(record: Path) -> dict[str, object]:
    """Return the record, or an empty one if the file is missing or broken by a merge."""
    try:
        content = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _date(text: object) -> date | None:
    try:
        return date.fromisoformat(str(text))
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
