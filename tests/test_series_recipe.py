"""The recipe for time series: sets in the format .ts, the whole recipe through the service, and the table."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.modeling import spec
from tests.serving import serving

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Made by a test.\n@problemName waves\n@equalLength false\n@classLabel true slow fast\n@data\n"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the set `waves`: series of two channels and different lengths, of a slow or a fast wave."""
    random = np.random.default_rng(0)
    folder = tmp_path / "sets" / "waves"
    folder.mkdir(parents=True)
    for part, count in (("TRAIN", 40), ("TEST", 20)):
        lines = []
        for number in range(count):
            label, period = (("slow", 12), ("fast", 4))[number % 2]
            steps = np.arange(random.integers(12, 30))
            channels = [100 + np.sin(2 * np.pi * (steps + random.integers(12)) / period), random.normal(size=len(steps))]
            lines.append(":".join([*(",".join(f"{value:.4f}" for value in channel) for channel in channels), label]))
        (folder / f"waves_{part}.ts").write_text(HEADER + "\n".join(lines) + "\n")
    return tmp_path / "sets"


def test_set_has_channels_and_lengths(data: Path) -> None:
    sets = module("training.series_sets")
    waves = sets.read_set(data, "waves")
    assert waves.labels == ("fast", "slow") and len(waves.train) == 40 and len(waves.test) == 20
    assert {series.rows.shape[1] for series in waves.train} == {2} and len({len(series.rows) for series in waves.train}) > 5
    assert sets.parse("1,2,3:4,5.5,6:b\n").rows.tolist() == [[1, 4], [2, 5.5], [3, 6]]
    assert sets.read(data / "waves", "waves", "TEST")[0].label == waves.test[0].label, "the folder may be that of the set"


def test_labels_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    for part in ("TRAIN", "TEST"):
        (tmp_path / f"n_{part}.ts").write_text("@data\n1:10\n1:9\n")
    assert module("training.series_sets").read_set(tmp_path, "n").labels == ("9", "10")


def test_held_out_fifth_has_all_labels(data: Path) -> None:
    sets = module("training.series_sets")
    train = sets.read_set(data, "waves").train
    rest, held_out = sets.hold_out(train, 3)
    assert len(held_out) == 8 and sorted(map(id, rest + held_out)) == sorted(map(id, train))
    assert sum(series.label == "slow" for series in held_out) == 4
    assert [id(one) for one in sets.hold_out(train, 4)[1]] != [id(one) for one in held_out]


def test_missing_set_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert module("train_series").main(["--data", str(tmp_path)]) == 2
    assert "JapaneseVowels_TRAIN.ts" in (error := capsys.readouterr().err) and "make series" in error


def test_padding_changes_no_score(data: Path) -> None:
    torch, classifier, sets = (
        importlib.import_module("torch"),
        module("training.series_classifier"),
        module("training.series_sets"),
    )
    series = sets.read_set(data, "waves").train[:6]
    for family in ("sru", "gru", "cnn", "tcn"):
        torch.manual_seed(0)
        model = classifier.SeriesClassifier(series, ("fast", "slow"), classifier.Settings(family, hidden=6)).eval()
        batch = classifier.Batch.of(series, model.labels)
        together = model(batch.rows, batch.lengths)
        alone = [model(part.rows, part.lengths) for part in (classifier.Batch.of([one], model.labels) for one in series)]
        assert torch.allclose(together, torch.cat(alone), atol=1e-5)


@pytest.mark.slow
def test_recipe_trains_and_evaluates_through_the_service(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, evaluation = module("train_series"), module("evaluate_series")
    line = ["--data", str(data), "--set", "waves", "--encoder", "gru", "--hidden", "12", "--epochs", "20", "--rate", "0.02"]
    assert recipe.main([*line, "--models", str(tmp_path / "models")]) == 0
    [percent] = [float(word) for word in capsys.readouterr().out.split()[:1]]
    assert percent >= 90, "the waves are easy to tell apart"
    card = (tmp_path / "models" / "waves-gru" / "1" / spec.CARD).read_text()
    assert "--set waves --encoder gru" in card and "$" not in card
    with serving(tmp_path / "models", tmp_path) as server:
        assert evaluation.main(["--data", str(data), "--set", "waves", "--url", server.address]) == 0
        assert f"| waves-gru | {percent:.1f} % |" in capsys.readouterr().out
    assert evaluation.main(["--data", str(data), "--set", "waves", "--url", "http://127.0.0.1:9"]) == 1


@pytest.mark.slow
def test_all_families_are_compared_once(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quick figures stay out of the table, and a model that is there is not trained again."""
    compare, pages, records = module("compare_series"), module("training.pages"), module("training.records")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- series -->\nold\n<!-- end of series -->\nafter\n")
    line = ["--data", str(data), "--sets", "waves", "--encoders", "cnn,qrnn", "--seeds", "2", "--seconds", "0.2", "--quick"]
    line += ["--models", str(tmp_path / "models"), "--results", str(tmp_path / "r.jsonl"), "--page", str(page)]
    assert compare.main(line) == 0
    measured = records.read(tmp_path / "r.jsonl")
    assert [record["kind"] for record in measured] == ["training"] * 4 + ["served"] * 4 + ["speed"] * 4
    for trained, served in zip(measured[:4], measured[4:8], strict=True):
        assert served["served_percent"] == pytest.approx(trained["stored_percent"])
    assert pages.drawn(page, "series") == [pages.EMPTY] and page.read_text().endswith("after\n")
    assert capsys.readouterr().out.count("is trained") == 4
    assert compare.main([*line, "--encoders", "cnn"]) == 0 and "is trained" not in capsys.readouterr().out


def test_table_has_means_and_deviations() -> None:
    place = {"date": "2026-01-02", "processor": "P", "quick": False, "set": "waves", "encoder": "sru"}
    measured = [
        {**place, "kind": "training", "seed": 1, "trained_percent": 10.0, "training_seconds": 9.0, "bytes": 9},
        *(
            {**place, "kind": "training", "seed": seed, "trained_percent": percent, "training_seconds": 10.0, "bytes": 2000}
            for seed, percent in ((1, 80.0), (2, 82.0))
        ),
        *(
            {**place, "kind": "served", "device": "cpu", "seed": seed, "served_percent": percent}
            for seed, percent in ((1, 80.5), (2, 81.5))
        ),
        *(
            {**place, "kind": "speed", "seed": 1, "device": "cuda:0", "gpu": "G", "callers": callers, **load}
            for callers, load in (
                (1, {"p50_ms": 0.5, "texts_per_second": 2000.0}),
                (64, {"p50_ms": 5.0, "texts_per_second": 9000.0}),
            )
        ),
        {**place, "kind": "training", "seed": 1, "quick": True, "set": "trial"},
    ]
    lines = "\n".join(module("compare_series").lines(measured))
    assert "| waves | sru | 2 | 81.0 ± 1.4 | 10 | 2,000 | 81.0 ± 0.7 | – | – | – | 0.50 | 9,000 |" in lines
    assert "Trained on P, from 2026-01-02" in lines and "Served on P, G, from 2026-01-02" in lines and "trial" not in lines


def test_readme_has_the_table_of_the_results_file() -> None:
    compare, pages, records = module("compare_series"), module("training.pages"), module("training.records")
    lines = compare.lines(records.read(ROOT / "examples" / "results-series.jsonl"))
    assert pages.drawn(ROOT / "examples" / "README.md", compare.MARK) == lines
