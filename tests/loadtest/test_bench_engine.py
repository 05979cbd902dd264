"""The bench of one engine, on the CPU with little to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench_engine, open_engine
from service.errors import DeadlineExceeded, Overloaded
from service.local import build_engine
from service.metrics import Metrics
from service.settings import Settings
from tests import models

MODEL = "question-type-cnn"


def test_stages_add_up_and_throughput_is_of_every_number_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--device", "cpu", "--models", MODEL, "--rows", "4", "--turns", "20", "--seconds", "0.02"]
    said += ["--open-seconds", "0", "--out", str(tmp_path)]
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


def test_requests_that_wait_for_nothing_are_all_accounted_for(tmp_path: Path) -> None:
    ids = {"kind": "ids", "vocabulary": 12, "max_steps": open_engine.LONG}
    regress = {"kind": "regress", "pool": "last"}
    spec = models.made_up(tmp_path, "small", ids, models.EMBEDDING, {"kind": "lstm", "hidden": 4}, head=regress)
    engine = build_engine(Settings(models=tmp_path, device="cpu"), Metrics())
    for mixture in (open_engine.REAL, open_engine.MIXED, open_engine.HEAVY):
        rate = open_engine.Driver(engine, spec.name, mixture, "continuous").capacity(0.2)
        assert rate > 0
        [under, over] = open_engine.measured(engine, spec.name, mixture, "continuous", rate, (0.2, 2.0), 0.2, 0.1)
        assert over.offered > under.offered
        assert over.refused + over.dropped > 0 or over.answered > rate
        assert under.p50_ms <= under.p99_ms <= under.p999_ms


def test_a_ledger_knows_who_was_refused_at_once_and_who_was_accepted_and_dropped() -> None:
    ledger = open_engine.Ledger(begin=1.0, end=2.0)
    ledger.sending = True
    ledger.refuse(1.5, Overloaded("full"))
    ledger.sending = False
    ledger.refuse(1.5, DeadlineExceeded("late"))
    ledger.refuse(2.5, DeadlineExceeded("late, and nobody counts it"))
    assert (ledger.refused, ledger.dropped) == (1, 1)
