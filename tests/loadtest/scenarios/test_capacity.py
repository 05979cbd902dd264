"""The capacity scenario loads every kind of request from several generators."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.generator.job import Result
from loadtest.generator.process import merged
from loadtest.scenarios.capacity import KINDS, MANY


def test_results_of_generators_are_added() -> None:
    one = Result(2.0, 10, 8, array("d", [0.1, 0.3]).tobytes(), {"status 503": 2}, 1.0, [3.0, 5.0])
    other = Result(4.0, 1, 2, array("d", [0.2]).tobytes(), {"status 503": 1, "broken": 1}, 0.5, [5.0, 6.0])
    both = merged([one, other])
    assert (both.seconds, both.due, both.answers, both.cpu_seconds) == (3.0, 11, 10, 1.5)
    assert both.ordered_latencies() == [0.1, 0.2, 0.3]
    assert both.failures == {"status 503": 3, "broken": 1}
    assert both.server_cpu_seconds == [4.0, 5.5], "each generator measured the same server"


@pytest.mark.server
def test_every_kind_is_measured_in_both_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(seconds: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        options = ["--generators", "2", "--callers", "2", "--seconds", seconds, "--rounds", "1", "--share", "0.3"]
        assert main(["capacity", *options, "--out", str(tmp_path / seconds)]) == 0
        [path] = (tmp_path / seconds).glob("capacity-*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    # A busy machine may answer nothing in a short time.
    tries = map(measure, ("0.2", "2", "20"))
    records = next(records for records in tries if all(record["answers"] for record in records))
    assert [(record["request"], record["loop"]) for record in records] == [
        (kind, loop) for kind in KINDS for loop in ("closed", "30%")
    ]
    for record in records:
        inputs = MANY if record["request"] in ("texts", "ids") else 1
        assert record["failed"] == 0
        assert record["inputs/s"] == pytest.approx(inputs * record["answers/s"], rel=1e-3)
        assert 0 < record["p50_ms"] <= record["p99_ms"]
        if record["loop"] == "closed":
            assert record["frontends_us"] > 0 < record["engine_us"]
    assert capsys.readouterr().out.count(" 2 x ") == len(records)
