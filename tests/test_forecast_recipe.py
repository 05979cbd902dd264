"""The recipe for forecasts with intervals: quantiles, planted faults, and the whole recipe through the service."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.modeling import spec
from tests.serving import serving

pytestmark = pytest.mark.usefixtures("examples")


def module(name: str) -> Any:
    return importlib.import_module(name)


def test_true_quantiles_have_the_least_loss_and_cover_four_fifths() -> None:
    intervals = module("training.intervals")
    following = np.random.default_rng(0).normal(size=(10, 2000, 1))
    true = np.broadcast_to([-1.2816, 0.0, 1.2816], (*following.shape, 3))
    assert intervals.coverage(true, following) == pytest.approx(0.8, abs=0.01)
    assert intervals.width(true) == pytest.approx(2.5632)
    for wrong in (0.8 * true, 1.2 * true, true + 0.2):
        assert intervals.pinball(wrong, following) > intervals.pinball(true, following)


def test_loss_of_the_training_is_that_of_the_evaluation() -> None:
    torch, intervals, recipe = importlib.import_module("torch"), module("training.intervals"), module("train_forecast")
    random = np.random.default_rng(1)
    forecasts, following = random.normal(size=(2, 5, 3, 3)), random.normal(size=(2, 5, 3))
    trained = recipe.loss(torch.from_numpy(forecasts), torch.from_numpy(following))
    assert float(trained) == pytest.approx(intervals.pinball(forecasts, following))


def test_surprise_is_the_distance_in_halves_of_the_interval() -> None:
    intervals = module("training.intervals")
    forecasts = np.array([[[[-1.0, 0.0, 1.0], [4.0, 5.0, 8.0]]]])
    assert intervals.surprise(forecasts, np.array([[[0.5, 9.0]]])).tolist() == [[2.0]]
    assert intervals.ordered(np.array([[3.0, 1.0, 2.0]]), 1).tolist() == [[[1.0, 2.0, 3.0]]]


def test_threshold_is_exceeded_by_its_share() -> None:
    scores = np.random.default_rng(0).random((4, 5000))
    assert (scores > module("training.intervals").threshold(scores, 0.001)).sum() == 20


def test_planted_faults_are_where_they_are_said_to_be() -> None:
    anomalies = module("training.anomalies")
    clean = np.random.default_rng(0).normal(size=(3, 400, 2)).astype(np.float32)
    faulty, faults = anomalies.plant(np.random.default_rng(1), clean)
    assert {fault.kind for fault in faults} == set(anomalies.KINDS) and len(faults) == 3 * 3
    changed = (faulty != clean).any(axis=-1)
    for fault in faults:
        assert changed[fault.stream, fault.begin : fault.end].all()
        changed[fault.stream, fault.begin : fault.end] = False
    assert not changed.any()


def test_alarms_are_finds_or_false_alarms() -> None:
    anomalies = module("training.anomalies")
    faults = [
        anomalies.Fault("spike", 0, 100, 101),
        anomalies.Fault("frozen", 0, 200, 220),
        anomalies.Fault("shift", 1, 50, 70),
    ]
    alarms = np.zeros((2, 300), bool)
    alarms[0, [10, 103, 200, 230]] = alarms[1, 90] = True
    found = anomalies.count(alarms, faults)
    assert found.found == {"spike": 1.0, "frozen": 1.0, "shift": 0.0} and found.delay == 1.5
    ordinary = 600 - (1 + 20) - (20 + 20) - (20 + 20)
    assert found.false_alarms == pytest.approx(1000 * 2 / ordinary), "230 is in the recovery of a fault, 90 is not"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gru", "tcn"])
def test_recipe_trains_and_evaluates_through_the_service(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch, recipe, evaluation = importlib.import_module("torch"), module("train_forecast"), module("evaluate_forecast")
    assert recipe.main(["--quick", "--encoder", family, "--models", str(tmp_path / "models")]) == 0
    assert "pinball loss" in capsys.readouterr().out
    folder = tmp_path / "models" / f"forecast-{family}" / "1"
    card = (folder / spec.CARD).read_text()
    assert "--quick" in card and "$" not in card
    with serving(tmp_path / "models", tmp_path) as server:
        name = f"forecast-{family}"
        line = ["--model", name, "--url", server.address, "--streams", "3", "--steps", "150"]
        assert evaluation.main([*line, "--results", str(tmp_path / "r.jsonl")]) == 0
        assert evaluation.main(["--model", "other", "--url", server.address]) == 1
        readings = evaluation.streams((0,), 2, 40)
        served = importlib.import_module("asyncio").run(evaluation.forecasts(server.address, name, readings))
    [record] = module("training.records").read(tmp_path / "r.jsonl")
    assert record["faults"] == 3 and record["p99_ms"] >= record["p50_ms"] > 0 and 0 <= record["coverage_percent"] <= 100
    assert "has no model 'other'" in capsys.readouterr().err
    model = recipe.SignalModel(family, torch.zeros(2, 3), 8, 9, causal=True).eval()
    model.load(folder)
    with torch.no_grad():
        expected = recipe.forecast(model, torch.from_numpy(readings[:, :-1])).numpy()
    assert np.allclose(served, np.sort(expected, axis=-1), atol=1e-3)
