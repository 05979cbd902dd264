"""100,000 mutated requests over HTTP, WebSockets and gRPC to a running service. `python -m tests.long.fuzz.wire` sends more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long import scaled
from tests.long.fuzz.wire.run import fuzzed, served

REQUESTS = scaled(100_000)


def test_mutated_requests_get_valid_replies_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fuzzed(served(tmp_path / "models"), tmp_path) as fuzzer:
        fuzzer.run(REQUESTS)
    with capsys.disabled():
        print(f"\n{fuzzer.account}")
    assert not fuzzer.account.faults
