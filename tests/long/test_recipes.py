"""Every recipe, run as a user runs it: a quick training, the model folder with its card, and its quality through the service."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.serving import Server, serving

pytestmark = pytest.mark.usefixtures("examples")

SCRIPTS = ("text", "tags", "spans", "language", "series", "forecast", "expected")
SETS = {"text": "colours", "series": "waves"}
NAMES = {
    "text": "colours-gru",
    "tags": "facts-tags-gru",
    "spans": "facts-spans-gru",
    "language": "facts-language-gru",
    "series": "waves-gru",
    "forecast": "forecast-gru",
    "expected": "sensor-forecast",
    "keyword": "computer-gru",
}
COLOURS = {"warm": ("red", "orange", "yellow"), "cold": ("blue", "green", "violet")}
FILLERS = ("the", "a", "is", "of", "sea", "2", "sun", ".")
HEADER = "# Made by a test.\n@problemName waves\n@equalLength false\n@classLabel true slow fast\n@data\n"


@pytest.fixture(scope="module")
def evaluate() -> Any:
    return importlib.import_module("evaluate")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated sets, the texts `colours` with the label of their colour, and the series `waves` of a slow or a fast wave."""
    folder = tmp_path_factory.mktemp("data")
    assert importlib.import_module("make_sets").main([str(folder), "--quick"]) == 0
    random, lines = np.random.default_rng(1), []
    for number in range(120):
        label = ("warm", "cold")[number % 2]
        words = [*random.choice(FILLERS, random.integers(0, 9)), random.choice(COLOURS[label])]
        lines.append(f"{label} {' '.join(random.permutation(words))}")
    for part, texts in (("train", lines[12:]), ("test", lines[:12])):
        (folder / f"colours.{part}.txt").write_text("\n".join(texts) + "\n", "latin-1")
    for part, count in (("TRAIN", 40), ("TEST", 20)):
        series = []
        for number in range(count):
            label, period = (("slow", 12), ("fast", 4))[number % 2]
            steps = np.arange(random.integers(12, 30))
            channels = [100 + np.sin(2 * np.pi * (steps + random.integers(12)) / period), random.normal(size=len(steps))]
            series.append(":".join([*(",".join(f"{value:.4f}" for value in channel) for channel in channels), label]))
        (folder / f"waves_{part}.ts").write_text(HEADER + "\n".join(series) + "\n")
    return folder


def train(evaluate: Any, task: str, data: Path, models: Path, *more: str) -> dict[str, Any]:
    """Train a quick model, and return its record."""
    recipe, results = evaluate.RECIPES[task], models / "results.jsonl"
    models.mkdir(parents=True, exist_ok=True)
    name = ["--set", SETS[task]] if task in SETS else []
    family = [] if task == "expected" else ["--encoder", "gru"]
    line = ["--quick", "--data", str(data), "--models", str(models), "--results", str(results), *name, *family, *more]
    assert importlib.import_module("training.recipe").main(recipe, "", line) == 0
    return records(results)[-1]


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(evaluate: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A models folder with a quick model of each recipe, and their records by task."""
    models = tmp_path_factory.mktemp("models")
    return models, {task: train(evaluate, task, data, models) for task in SCRIPTS}


@pytest.fixture(scope="module")
def server(trained: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(trained[0], tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.mark.parametrize("task", SCRIPTS)
def test_quality_through_the_service_is_that_of_the_training(
    task: str, evaluate: Any, trained: tuple[Path, dict[str, Any]], server: Server, data: Path, tmp_path: Path
) -> None:
    """On the same examples. A language model and forecasts go through sessions, in chunks of one step."""
    limit = 5 if task in ("language", "forecast", "expected") else 200
    name = ["--set", SETS[task]] if task in SETS else []
    line = [task, "--data", str(data), "--url", server.address, "--limit", str(limit), *name]
    assert evaluate.main([*line, "--results", str(tmp_path / "r.jsonl")]) == 0
    [served] = records(tmp_path / "r.jsonl")
    assert served["model"] == NAMES[task] and served["quality"].keys() == trained[1][task]["quality"].keys()
    if limit == 200:
        assert served["quality"] == pytest.approx(trained[1][task]["quality"], abs=2.0), "close scores may round differently"
    if limit == 5:
        assert next(iter(served["quality"].values())) == pytest.approx(
            next(iter(trained[1][task]["quality"].values())), rel=0.3
        )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is missing: make programs PROGRAMS=speech")
def test_keyword_recipe_hears_through_the_service(evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The small model hears little, so only its agreement with PyTorch is checked, and that it hears in recordings."""
    models, folder, raw = tmp_path / "models", tmp_path / "speech", tmp_path / "noise.raw"
    importlib.import_module("training.keyword_sets").make(folder, "computer", {"train": 2, "test": 2})
    record = train(evaluate, "keyword", folder, models)
    raw.write_bytes(np.random.default_rng(0).normal(0, 3000, 32_000).astype("<i2").tobytes())
    with serving(models, tmp_path) as server:
        line = ["keyword", "--data", str(folder), "--url", server.address]
        assert evaluate.main([*line, "--results", str(tmp_path / "r.jsonl")]) == 0
        hear = importlib.import_module("hear_keyword").main
        assert hear(["--model", NAMES["keyword"], "--url", server.address, str(raw)]) == 0
        assert hear(["--model", "other", "--url", server.address, str(raw)]) == 1
    [served] = records(tmp_path / "r.jsonl")
    assert served["quality"] == pytest.approx(record["quality"], nan_ok=True)
    printed = capsys.readouterr()
    assert "noise.raw, 2.0 s: " in printed.out and "has no model 'other'" in printed.err


# Parts of the training.


def test_best_epoch_is_kept_and_patience_ends_the_training() -> None:
    """The scores 50, 70, 60, 70 with a patience of 2 end the training after epoch 4; the weights come from epoch 2."""
    models, encoders = importlib.import_module("training.model"), importlib.import_module("training.encoders")
    model = models.Model(models.Raw(), encoders.STEP_ENCODERS["gru"](2, 3, True), 1)
    scores, heads, rows = iter([50.0, 70.0, 60.0, 70.0]), [], torch.randn(4, 5, 2)

    def backward(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch, torch.full((4,), 5)).square().mean()
        torch.autograd.backward(loss)
        return loss.detach()

    def score() -> float:
        heads.append(model.head.weight.detach().clone())
        return next(scores)

    fitted = importlib.import_module("training.fitting").fit(
        model, 9, 0.01, lambda _: [rows], backward, score=score, patience=2
    )
    assert (fitted.epoch, fitted.score, len(heads)) == (2, 70.0, 4) and fitted.seconds > 0
    assert torch.equal(model.head.weight, heads[1]) and not torch.equal(heads[1], heads[3])


def test_adversarial_step_adds_the_gradients_of_embeddings_with_a_higher_loss() -> None:
    recipe, models, batches = (
        importlib.import_module("train_text"),
        importlib.import_module("training.model"),
        importlib.import_module("training.batches"),
    )
    model = models.Model(
        models.Embedding(9, 4), importlib.import_module("training.encoders").ENCODERS["lstm"](4, 3), 2, pooled=True
    )
    [batch] = batches.batches([batches.Row(torch.tensor([1, 2]), torch.tensor([1]))], 1)
    table = model.inputs.table.weight

    def step(push: float) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss = recipe.adversarial(model, batch, recipe.Settings("lstm", push=push))
        return float(loss), table.grad.clone()

    before = table.detach().clone()
    loss, gradient = step(0.0)
    _, both = step(0.1)
    torch.testing.assert_close(table.detach(), before)
    table.data.add_(gradient / gradient.norm(), alpha=0.1)
    higher, moved = step(0.0)
    assert higher > loss
    torch.testing.assert_close(both, gradient + moved)


def test_training_tells_its_progress_without_a_terminal(
    evaluate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = importlib.import_module("training.terminal")
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    with terminal.bar("training", 4) as advance:
        advance(1, "loss 0.5")
        assert "training: 25 %, 0 s  loss 0.5" in capsys.readouterr().err
