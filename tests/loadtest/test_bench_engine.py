"""The bench of one engine, on the CPU with little to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench_engine

MODEL = "question-type-cnn"


def test_stages_add_up_and_throughput_is_of_every_number_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--device", "cpu", "--models", MODEL, "--rows", "4", "--turns", "20", "--seconds", "0.02", "--out", str(tmp_path)]
    assert bench_engine.main(said) == 0
    [path] = tmp_path.iterdir()
    single, *levels = [json.loads(line) for line in path.read_text().splitlines()]
    stages = single["stages_us"]
    assert single["model"] == MODEL and set(stages) == set(bench_engine.STAGES)
    assert stages["total"][1] <= stages["total"][0] <= stages["total"][2]
    assert stages["total"][0] == pytest.approx(sum(stages[stage][0] for stage in bench_engine.STAGES[:-1]), rel=0.2)
    assert [level["rows"] for level in levels] == [1, 2, 4]
    assert all(level["sequences_per_second"] > 0 and level["device_share"] > 0 for level in levels)
    assert str(path) in capsys.readouterr().out
