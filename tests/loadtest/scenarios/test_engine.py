"""The engine scenario, on the CPU with little work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loadtest.__main__ import main
from loadtest.scenarios import engine as engine_scenario
from loadtest.scenarios import engine_open_loop
from loadtest.scenarios.engine_host import BLOCKS
from service.local import build_engine
from service.metrics import Metrics
from service.settings import Settings
from tests import models

MODEL = "question-type-cnn"


def test_stages_add_up_and_every_batch_size_has_a_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The stages of one batch add up exactly. The medians of several batches need not, least of all on a busy machine.
    options = ["--device", "cpu", "--models", MODEL, "--rows", "4", "--batches", "1", "--seconds", "0.02"]
    assert main(["engine", *options, "--open-seconds", "0", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    single, *levels = [json.loads(line) for line in path.read_text().splitlines()]
    stages = single["stages_us"]
    assert single["model"] == MODEL and set(stages) == set(engine_scenario.STAGES)
    assert stages["total"][1] <= stages["total"][0] <= stages["total"][2]
    assert stages["total"][0] == pytest.approx(sum(stages[stage][0] for stage in engine_scenario.STAGES[:-1]), abs=0.1)
    sizes, host_times = levels[:3], levels[3:]
    assert [level["rows"] for level in sizes] == [1, 2, 4]
    assert all(level["sequences_per_second"] > 0 and level["device_share"] > 0 for level in sizes)
    assert [(host["blocks"], host["requests"]) for host in host_times] == list(BLOCKS)
    for host in host_times:
        rows = min(host["blocks"] * host["requests"], engine_scenario.DEFAULT_LIMITS[0])
        assert host["batch_us"] == pytest.approx(rows * host["request_us"], rel=0.1)
    assert str(path) in capsys.readouterr().out


@pytest.mark.slow
def test_open_loop_accounts_for_every_request(tmp_path: Path) -> None:
    ids = {"kind": "ids", "vocabulary": 12, "max_steps": engine_open_loop.LONG}
    regress = {"kind": "regress", "pool": "last"}
    spec = models.made_up(tmp_path, "small", ids, models.EMBEDDING, {"kind": "lstm", "hidden": 4}, head=regress)
    engine = build_engine(Settings(models=tmp_path, device="cpu"), Metrics())
    for mixture in (engine_open_loop.REAL, engine_open_loop.MIXED, engine_open_loop.HEAVY):
        load = engine_open_loop.EngineLoad(engine, spec.name, mixture, "continuous")
        # A busy machine may answer nothing in a short time.
        rate = next(rate for seconds in (0.2, 1.0, 5.0, 25.0) if (rate := load.capacity(seconds)) > 0)
        [under, over] = engine_open_loop.levels(engine, spec.name, mixture, "continuous", rate, (0.2, 2.0), 0.2, 0.1)
        assert over.offered > under.offered
        assert over.refused + over.dropped > 0 or over.answered > rate
        assert under.p50_ms <= under.p99_ms <= under.p999_ms


def test_ledger_counts_each_outcome() -> None:
    ledger = engine_open_loop.Ledger(begin=1.0, end=2.0, allowed=0.1)
    due = np.array([1.1, 1.2, 1.3, 1.4, 1.95, 1.96, 0.9, 2.5])
    ledger.send(due[:5], np.array([5, 5, 5, engine_open_loop.LONG, 5]))
    ledger.send(due[5:], np.array([5, 5, 5]))
    ledger.refuse([0, 5], at_once=True)
    ledger.refuse([1], at_once=False)
    ledger.answer([2, 6], 1.35)
    ledger.answer([3], 1.5005)
    ledger.answer([4], 2.01)
    ledger.refuse([7], at_once=True)  # due after the measured time
    outcome = ledger.outcome()
    assert ledger.open == 0
    assert (outcome.offered, outcome.refused, outcome.dropped, outcome.answered) == (6, 2, 2, 1)
    assert sorted(outcome.seconds) == pytest.approx([0.05, 0.06, 0.1005])
    assert sorted(outcome.short) == pytest.approx([0.05, 0.06])
