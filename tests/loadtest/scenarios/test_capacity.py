"""The capacity scenario loads every kind of request from several generators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.requests import KINDS, MANY


@pytest.mark.server
def test_every_kind_is_measured_in_both_loops(tmp_path: Path) -> None:
    def measure(seconds: str) -> list[dict[str, Any]]:
        options = ["--generators", "2", "--callers", "2", "--seconds", seconds, "--rounds", "1", "--share", "0.3"]
        assert main(["capacity", *options, "--out", str(tmp_path / seconds)]) == 0
        [path] = (tmp_path / seconds).glob("capacity-*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    # A busy machine may answer nothing in a short time.
    tries = map(measure, ("0.2", "2", "20"))
    records = next(records for records in tries if all(record["answers"] for record in records))
    cases = [(record["request"], record["loop"]) for record in records]
    assert cases == [(kind, loop) for kind in KINDS for loop in ("closed", "30%")]
    for record in records:
        inputs = MANY if record["request"] in ("texts", "ids") else 1
        assert record["failed"] == 0
        assert record["inputs_per_second"] == pytest.approx(inputs * record["answers_per_second"], rel=1e-3)
        assert 0 < record["p50_ms"] <= record["p99_ms"]
        if record["loop"] == "closed":
            assert record["frontends_us"] > 0 < record["engine_us"]
