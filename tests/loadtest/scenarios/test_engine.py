"""The engine scenario, on the CPU with little work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.scenarios.engine import STAGES


def test_stages_add_up_and_every_batch_size_has_a_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The stages of one batch add up exactly. The medians of several batches need not, least of all on a busy machine.
    options = ["--device", "cpu", "--models", "question-type-cnn", "--rows", "4", "--batches", "1", "--seconds", "0.02"]
    assert main(["engine", *options, "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    single, *sizes = [json.loads(line) for line in path.read_text().splitlines()]
    stages = single["stages_us"]
    assert list(stages) == list(STAGES)
    assert stages["total"][0] == pytest.approx(sum(stages[stage][0] for stage in STAGES[:-1]), abs=0.1)
    assert [size["rows"] for size in sizes] == [1, 2, 4]
    assert all(size["sequences_per_second"] > 0 and size["device_share"] > 0 for size in sizes)
    assert str(path) in capsys.readouterr().out
