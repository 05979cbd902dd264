"""The recipe that makes text classifiers smaller: distillation, the variants through the service, the results file and the table."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.modeling import spec

pytestmark = pytest.mark.usefixtures("examples")

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {"warm": ("red", "orange", "yellow"), "cold": ("blue", "green", "violet")}
FILLERS = ("the", "a", "is", "of", "sea", "sun")
VARIANTS = ("original", "int8", "rank", "rank-tuned", "words", "distilled")


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the set `colours` in two parts. A text is of the label of its colour."""
    random = np.random.default_rng(1)
    folder = tmp_path / "data"
    folder.mkdir()
    for part, count in (("train", 120), ("test", 20)):
        lines = []
        for number in range(count):
            label = ("warm", "cold")[number % 2]
            words = [*random.choice(FILLERS, random.integers(0, 9)), random.choice(COLOURS[label])]
            lines.append(f"{label} {' '.join(random.permutation(words))}")
        (folder / f"colours.{part}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_soft_loss_is_the_divergence_at_a_temperature() -> None:
    soft_loss = module("training.distillation").soft_loss
    scores, expected = torch.tensor([[1.0, 0.0, -2.0], [0.5, 3.0, 0.0]]), torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    student, teacher = (scores / 3).softmax(1), (expected / 3).softmax(1)
    divergence = (teacher * (teacher.log() - student.log())).sum(1).mean()
    torch.testing.assert_close(soft_loss(scores, expected, 3.0), 9 * divergence)
    assert soft_loss(expected + 5.0, expected, 3.0) == pytest.approx(0.0, abs=1e-6)


def test_distilled_student_learns_the_answers_of_its_teacher() -> None:
    """All labels of the training texts are the same. A student of soft labels alone still answers as the teacher."""
    classifier, fitting, vocabulary = (module(f"training.{name}") for name in ("classifier", "fitting", "vocabulary"))
    rows = [vocabulary.TokenisedText(number % 2, torch.tensor([1 + number % 2, 3])) for number in range(40)]
    settings = replace(
        module("train_text").DEFAULTS["cnn"], width=8, hidden=8, epochs=10, rate=0.02, batch=10, push=0.0, patience=0
    )
    teacher = fitting.fit(rows, [], ("a", "b"), torch.full((4, 8), torch.nan), settings).model
    assert teacher.accuracy(rows) == 100.0
    mislabelled = [replace(row, label=0) for row in rows]
    for share, agreement in ((1.0, 100.0), (0.0, 50.0)):
        torch.manual_seed(2)
        student = classifier.Classifier("cnn", 4, 4, 4, ("a", "b"))
        loss = module("training.distillation").Distillation(teacher, 2.0, share)
        assert fitting.improve(student, mislabelled, [], settings, loss=loss).model.accuracy(rows) == agreement


def test_training_goes_on_from_the_weights_of_a_model() -> None:
    classifier, fitting, vocabulary = (module(f"training.{name}") for name in ("classifier", "fitting", "vocabulary"))
    torch.manual_seed(1)
    model = classifier.Classifier("gru", 5, 4, 3, ("a", "b"))
    before = {name: view.clone() for name, view in model.tensors().items()}
    rows = [vocabulary.TokenisedText(number % 2, torch.tensor([1 + number % 2])) for number in range(8)]
    settings = replace(module("train_text").DEFAULTS["gru"], epochs=1, rate=1e-4)
    after = fitting.improve(model, rows, [], settings).model.tensors()
    assert any(not torch.equal(after[name], view) for name, view in before.items())
    for name, view in before.items():
        torch.testing.assert_close(after[name], view, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_variants_are_made_served_and_recorded_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second command has nothing to do."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    compress_text, pages, records = module("compress_text"), module("training.pages"), module("training.records")
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text("before\n<!-- compression -->\nold\n<!-- end of compression -->\nafter\n")
    line = [
        "--data",
        str(data),
        "--sets",
        "colours",
        "--encoders",
        "lstm",
        "--seeds",
        "1",
        "--seconds",
        "0",
        "--jobs",
        "1",
        "--quick",
    ]
    line += ["--vocabulary", "6", "--models", str(tmp_path / "models"), "--results", str(results), "--page", str(page)]
    assert compress_text.main([*line, "--variants", ",".join(VARIANTS)]) == 0
    measured = records.read(results)
    assert [(record["kind"], record["variant"]) for record in measured] == [
        (kind, variant) for kind in ("training", "served") for variant in VARIANTS
    ]
    folders = {name: tmp_path / "models" / "quick" / "colours-lstm-0-1" / f"colours-lstm-{name}" / "1" for name in VARIANTS}
    described = {name: spec.read(folder) for name, folder in folders.items()}
    assert described["int8"].precision == "int8" and described["words"].input.vocabulary == 7
    embeddings = [described[name].layers[0] for name in VARIANTS]
    widths = [layer.width for layer in embeddings if isinstance(layer, spec.EmbeddingLayer)]
    assert widths == [12, 12, 6, 6, 12, 8]
    for name, record in zip(VARIANTS, measured[: len(VARIANTS)], strict=True):
        files = [file for file in folders[name].iterdir() if file.name != spec.CARD]
        assert record["bytes"] == sum(file.stat().st_size for file in files)
    weights = [(folders[name] / spec.WEIGHTS).read_bytes() for name in ("rank", "rank-tuned")]
    assert weights[0] != weights[1]
    card = (folders["rank-tuned"] / spec.CARD).read_text()
    assert "$" not in card and card.count("## Price") == 1 and card.count("| colours | lstm | ") == 2
    assert "| rank 6, trained again | 1 |" in card and "## Price" not in (folders["original"] / spec.CARD).read_text()
    assert pages.drawn(page, "compression") == ["No measurements are recorded yet."] and page.read_text().endswith("after\n")
    capsys.readouterr()
    assert compress_text.main([*line, "--variants", ",".join(VARIANTS)]) == 0
    assert records.read(results) == measured and capsys.readouterr().out == ""


def test_variant_is_missing_for_other_choices_on_which_it_depends(tmp_path: Path) -> None:
    compress_text, choices = module("compress_text"), module("training.compression").Choices()
    run = compress_text.Run("trec", "sru", 0, 1)
    plans = [
        compress_text.Plan(tmp_path, tmp_path, tmp_path / "r.jsonl", each, None, False, "cpu", 0.0)
        for each in (choices, replace(choices, temperature=7.0))
    ]
    for variant in ("rank-tuned", "distilled"):
        plans[0].append(run, variant, {"kind": "training"})
    assert all(plans[0].has(run, variant, kind="training") for variant in ("rank-tuned", "distilled"))
    assert plans[1].has(run, "rank-tuned", kind="training") and not plans[1].has(run, "distilled", kind="training")
    assert not plans[0].has(run, "distilled", kind="served")


def test_only_models_that_a_missing_figure_needs_are_made(data: Path, tmp_path: Path) -> None:
    compress_text, choices = module("compress_text"), module("training.compression").Choices()
    plan = compress_text.Plan(data, tmp_path, tmp_path / "r.jsonl", choices, None, False, "cpu", 0.0)
    run, variants = compress_text.Run("colours", "sru", 0, 1), ["original", "rank", "rank-tuned"]
    assert compress_text.missing_models(plan, run, variants, ["cpu"]) == {*variants}
    for variant in variants:
        plan.append(run, variant, {"kind": "training"})
        plan.append(run, variant, {"kind": "served", "device": "cpu"})
    assert compress_text.missing_models(plan, run, variants, ["cpu"]) == set()
    assert compress_text.missing_models(plan, run, ["rank"], ["cpu", "cuda:0"]) == {"original", "rank"}
    plan.job(run).folder("original").mkdir(parents=True)
    assert compress_text.missing_models(plan, run, ["rank-tuned"], ["cuda:0"]) == {"rank", "rank-tuned"}
    assert compress_text.missing_models(plan, run, ["distilled-int8"], ["cpu"]) == {"distilled", "distilled-int8"}
    timed = replace(plan, seconds=1.0)
    assert timed.unmeasured(run, "rank", ["cpu"]) == ["speed"]
    assert timed.unmeasured(compress_text.Run("colours", "sru", 0, 2), "rank", ["cpu"]) == ["served"]


def test_tenth_of_the_training_part_replaces_the_test_part(data: Path, tmp_path: Path) -> None:
    compress_text, text_sets = module("compress_text"), module("training.text_sets")
    (data / "colours.test.txt").write_text("warm secret\n")
    plans = [
        compress_text.Plan(
            data, tmp_path, tmp_path / "r.jsonl", module("training.compression").Choices(), holdout, False, "cpu", 0.0
        )
        for holdout in (3, None)
    ]
    jobs = [plan.job(compress_text.Run("colours", "sru", 0, 1)) for plan in plans]
    whole = text_sets.read_set(data, "colours").train
    assert (jobs[0].text_set.train, jobs[0].text_set.test) == text_sets.hold_out(whole, 3)
    assert [example.text for example in jobs[1].text_set.test] == ["secret"] and jobs[0].models != jobs[1].models
    train, development = jobs[0].parts
    assert len(train) + len(development) == len(jobs[0].text_set.train) and not {*development} & {*map(id, train)}


def test_missing_set_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert module("compress_text").main(["--data", str(tmp_path), "--sets", "mr"]) == 2
    assert "mr.train.txt" in capsys.readouterr().err


def test_table_has_the_price_of_each_variant() -> None:
    table = module("training.compression_table")
    place = {"date": "2026-01-02", "processor": "P"}
    common: dict[str, Any] = {
        "set": "trec",
        "encoder": "sru",
        "fold": 0,
        "quick": False,
        "holdout": None,
        "choices": {},
        **place,
    }

    def model(variant: str, seed: int, size: int, percents: dict[str, float], **more: Any) -> list[dict[str, Any]]:
        of = {**common, "variant": variant, "seed": seed, **more}
        trained = {**of, "kind": "training", "title": f"the {variant}", "training_seconds": 10.0, "bytes": size}
        return [
            trained,
            *({**of, "kind": "served", "device": device, "served_percent": value} for device, value in percents.items()),
        ]

    speeds = [
        {
            **common,
            "kind": "speed",
            "variant": "int8",
            "seed": 1,
            "device": device,
            "callers": callers,
            "p50_ms": ms,
            "texts_per_second": 1.0,
        }
        for device, callers, ms in (("cpu", 1, 0.5), ("cpu", 64, 9.0), ("cuda:0", 1, 0.25))
    ]
    measured = [
        *model("original", 1, 2000, {"cpu": 80.0}),
        *model("original", 2, 2000, {"cpu": 90.0}),
        *model("int8", 1, 600, {"cpu": 79.0, "cuda:0": 81.0}),
        *model("int8", 2, 600, {"cpu": 88.0}),
        *speeds,
        *model("rank", 1, 500, {"cpu": 10.0}, choices={"rank": 4}),
        *model("rank", 1, 400, {}, choices={"rank": 3}),
        *model("words", 1, 300, {"cpu": 10.0}, quick=True),
        *model("words", 1, 300, {"cpu": 10.0}, holdout=1),
    ]
    lines = table.lines(table.of_kind(measured))
    assert "| trec | sru | the original | 2 | 10 | 2,000 | 100 % | 85.0 ± 7.1 | +0.0 | – | – | – | – |" in lines
    assert "| trec | sru | the int8 | 2 | 10 | 600 | 30 % | 83.5 ± 6.4 | -1.5 | 0.50 | 81.0 | – | 0.25 |" in lines
    assert "| trec | sru | the rank | 1 | 10 | 400 | 20 % | – | – | – | – | – | – |" in lines
    assert "words" not in "\n".join(lines) and lines[-1].startswith("Served on P, from")
    assert [line.split(" | ")[2] for line in table.lines(measured, ("original", "rank"))[2:4]] == ["the original", "the rank"]


def test_readme_has_the_table_of_the_results_file() -> None:
    table, pages, records = (module(f"training.{name}") for name in ("compression_table", "pages", "records"))
    measured = records.read(ROOT / "examples" / "results-compression.jsonl")
    assert pages.drawn(ROOT / "examples" / "README.md", table.MARK) == table.lines(table.of_kind(measured))
