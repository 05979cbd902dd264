"""Requests with known answers while engines are killed. `python -m tests.long.endurance sessions` sends ten millions of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long.endurance.__main__ import Plan, run

CHUNKS, SESSIONS, REQUESTS = 300_000, 3_000, 500_000
FAULT_SECONDS = 10.0


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
