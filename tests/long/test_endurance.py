"""Requests with known answers while engines are killed. `python -m tests.endurance sessions` sends ten millions of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import planted
from tests.endurance.__main__ import Plan, run

CHUNKS, SESSIONS, REQUESTS = 300_000, 3_000, 500_000
FAULT_SECONDS, NEVER = 10.0, 1e9
FEW, FEW_SESSIONS = 20_000, 500
WITH_KILLS, OFTEN_SECONDS = 60_000, 2.0
"""Chunks that take much longer than a killed engine's replacement, and the time between two kills."""


@pytest.mark.parametrize(
    "plan", [Plan("sessions", CHUNKS, SESSIONS, FAULT_SECONDS), Plan("requests", REQUESTS, 0, FAULT_SECONDS)]
)
def test_every_answer_is_known_while_engines_are_killed(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No sum is wrong, no answer belongs to another request, and every lost session is reported once."""
    tally = run(plan, tmp_path, print)
    with capsys.disabled():
        print(f"\n{dict(tally.counts)}")
    assert not tally.counts["wrong"], "\n".join(tally.faults)
    assert tally.counts["kills"] >= 1
    if plan.kind == "sessions":
        assert all(tally.counts[name] for name in ("exports", "imports", "sessions in killed engines", "expired and reported"))


def test_wrong_sums_are_detected(tmp_path: Path) -> None:
    tally = run(Plan("sessions", FEW, FEW_SESSIONS, NEVER, wrong=3), tmp_path, print)
    assert tally.counts["wrong"] == 3, tally.faults


@pytest.mark.parametrize("fault", ["forgets-lost", "reports-twice"])
def test_loss_that_is_not_reported_once_is_detected(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.plant(fault, monkeypatch)
    assert run(Plan("sessions", WITH_KILLS, FEW_SESSIONS, OFTEN_SECONDS), tmp_path, print).counts["wrong"]


def test_answers_to_each_other_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.plant("swapped-answers", monkeypatch)
    assert run(Plan("requests", FEW, 0, NEVER), tmp_path, print).counts["wrong"]
