"""100,000 mutated requests over HTTP, WebSockets and gRPC to a running service. `python -m tests.fuzz.wire` sends more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.wire.run import fuzzed, served

REQUESTS, CARELESS_REQUESTS = 100_000, 20_000


def test_mutated_requests_get_valid_replies_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fuzzed(served(tmp_path / "models"), tmp_path) as fuzzer:
        fuzzer.run(REQUESTS)
    with capsys.disabled():
        print(f"\n{fuzzer.account}")
    assert not fuzzer.account.faults


def test_careless_service_is_detected(tmp_path: Path) -> None:
    """It fails, keeps its event loop busy, reveals paths, and keeps the names that clients send, also as labels."""
    with fuzzed(served(tmp_path / "models"), tmp_path, "careless") as fuzzer:
        fuzzer.run(CARELESS_REQUESTS)
    assert {"reply", "failed", "bug", "stall", "leak", "label", "growth"} <= fuzzer.account.findings.keys()
