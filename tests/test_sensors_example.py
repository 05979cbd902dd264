"""The model sensor-forecast: its training script, and the shipped folder compared with its card."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.ragged import Ragged
from service.cli import main
from service.engine.batching.state_slots import FIRST_SLOT, ZERO_SLOT
from service.modeling import spec, store
from service.modeling.encoder import Encoder
from service.modeling.state_slabs import RowSlots
from tests.reloading import load
from tests.serving import Server, serving

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "models" / "sensor-forecast" / "1"
SMALL = ["--hidden", "4", "--rounds", "1", "--streams", "4", "--batch", "2", "--chunk", "512"]
STEPS = 300
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The module `examples/train_sensors.py`, which evaluates one seed with few streams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        module = importlib.import_module("train_sensors")
        patch.setattr(module, "SEEDS", 1)
        patch.setattr(module, "STREAMS_PER_SEED", 2)
        yield module


@pytest.fixture(scope="module")
def forecaster(example: Any) -> Any:
    """The shipped model in plain PyTorch."""
    return example.read_back(FOLDER)


@pytest.fixture(scope="module")
def readings(example: Any) -> Any:
    """A held-out stream, (1, STEPS, 3)."""
    return example.streams((example.TEST, 0), 1, STEPS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server of the shipped model, and its models folder."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(FOLDER, root / "sensor-forecast" / "1")
    with serving(root, tmp_path_factory.mktemp("log")) as server:
        yield server, root


@pytest.fixture
def encoder() -> Encoder:
    """The shipped model as the service runs it."""
    model_spec = spec.read(FOLDER)
    return Encoder(model_spec, store.read_arrays(FOLDER, model_spec), torch.device("cpu"))


def answer(encoder: Encoder, rows: Any, slots: RowSlots | None = None) -> Any:
    """Return the forecast of the row after these rows."""
    scores = encoder(Ragged(torch.from_numpy(rows), torch.tensor([0, len(rows)])), slots=slots).head_output.scores
    assert scores is not None
    return scores[0].numpy()


def card_table() -> str:
    """Return the first table of the card, which has the results."""
    match = re.search(r"(^\|.+\|\n)+", (FOLDER / spec.CARD).read_text(), re.MULTILINE)
    assert match
    return match[0].strip()


def card_figures() -> dict[str, list[float]]:
    """Return the rows of the results by forecast: the error of each channel and of all, then the lowest and highest seed of all."""
    rows = re.findall(r"^\| (\S.+?) \| (\d.+\)) \|$", card_table(), re.MULTILINE)
    return {name.strip("*"): [float(figure) for figure in re.findall(r"\d\.\d+", figures)] for name, figures in rows}


def test_streams_depend_on_the_seed_alone(example: Any) -> None:
    streams, repeated, different = (example.streams(seed, 2, 50) for seed in ((1, 2), (1, 2), (2, 2)))
    assert np.array_equal(streams, repeated) and not np.array_equal(streams, different)
    assert streams.shape == (2, 50, len(example.CHANNELS)) and streams.dtype == np.float32


def test_training_writes_a_servable_folder(
    example: Any, served: tuple[Server, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main([*SMALL, "--models", str(tmp_path)]) == 0
    assert "| **sensor-forecast** | " in capsys.readouterr().out
    card = (tmp_path / "sensor-forecast" / "1" / spec.CARD).read_text()
    assert "--hidden 4 --rounds 1" in card and "$" not in card
    server, root = served
    shutil.move(tmp_path / "sensor-forecast" / "1", root / "sensor-forecast" / "2")
    load(server, "sensor-forecast")
    [output] = server.infer("sensor-forecast", [[[0.1, 0.2, 0.3], [0.2, 0.3, 0.4]]], version=2).json()["outputs"]
    assert [type(value) for value in output["value"]] == [float] * 3


def test_quick_training_writes_a_small_model(example: Any, tmp_path: Path) -> None:
    assert example.main(["--quick", "--models", str(tmp_path), "--seed", "3"]) == 0
    card = (tmp_path / "sensor-forecast" / "1" / spec.CARD).read_text()
    assert "--hidden 8 --rounds 1 --streams 16" in card and "--seed 3" in card


def test_training_is_reproducible(example: Any) -> None:
    settings = example.Settings(hidden=4, rounds=1, streams=4, batch=2)
    weights, repeated = (example.train(settings).tensors() for _ in range(2))
    assert all(torch.equal(weights[name], repeated[name]) for name in weights)


def test_holdout_writes_no_folder(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert example.main([*SMALL, "--holdout"]) == 0
    assert "| the last reading, repeated | " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_shipped_model_beats_both_baselines(example: Any, forecaster: Any) -> None:
    """On the first seed of the card, the errors are within the card's range, and the model's are the smallest."""
    figures = card_figures()
    forecasts = forecaster.forecast, *example.baselines().values()
    errors = [example.errors_by_seed(forecast, [(example.TEST, 0)], 32, example.STEPS + 1)[0] for forecast in forecasts]
    for name, measured in zip(figures, errors, strict=False):
        *_, lowest, highest = figures[name]
        assert lowest - 0.001 < measured[-1] < highest + 0.001, name
    for baseline in errors[1:]:
        assert (errors[0] < baseline).all()


def test_shipped_card_is_generated_by_the_script(example: Any) -> None:
    assert (FOLDER / spec.CARD).read_text() == example.card(example.Settings(), card_table())


def test_card_reports_smaller_errors_on_every_channel() -> None:
    model, *baselines, _ = card_figures().values()
    assert len(baselines) == 2
    for baseline in baselines:
        assert all(error < baseline_error for error, baseline_error in zip(model, baseline, strict=True))


def test_encoder_agrees_with_pytorch_after_any_step(encoder: Encoder, forecaster: Any, readings: Any) -> None:
    forecasts = forecaster.forecast(readings)[0]
    for steps in (1, 2, 64, 65, STEPS):
        np.testing.assert_allclose(answer(encoder, readings[0, :steps]), forecasts[steps - 1], atol=ROUNDING)


def test_chunks_give_the_same_forecast_as_the_whole_stream(encoder: Encoder, readings: Any) -> None:
    assert encoder.streams
    encoder.allocate_states(FIRST_SLOT + 1)
    whole = answer(encoder, readings[0])
    for source, (begin, end) in zip((ZERO_SLOT, FIRST_SLOT, FIRST_SLOT), ((0, 5), (5, 6), (6, STEPS)), strict=True):
        slots = RowSlots(torch.tensor([source], dtype=torch.int32), torch.tensor([FIRST_SLOT], dtype=torch.int32))
        last = answer(encoder, readings[0, begin:end], slots)
    np.testing.assert_allclose(last, whole, atol=ROUNDING)


def test_examples_readme_shows_the_models_answer(encoder: Encoder) -> None:
    match = re.search(r"For the input `(.+?)` the model answers `(.+?)`", (ROOT / "examples" / "README.md").read_text())
    assert match
    forecast = answer(encoder, np.array(json.loads(match[1]), dtype=np.float32))
    np.testing.assert_allclose(json.loads(match[2])["value"], forecast, atol=0.001)


def test_readme_shows_the_errors_of_the_card() -> None:
    match = re.search(r"sensor-forecast.+\| error (\S+) \(last reading again: (\S+)\) \|", (ROOT / "README.md").read_text())
    assert match
    model, last_reading, *_ = (figures[-3] for figures in card_figures().values())
    assert [float(error) for error in match.groups()] == [model, last_reading]


def test_shipped_model_is_listed_and_served(
    forecaster: Any, readings: Any, served: tuple[Server, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--models", str(ROOT / "models")]) == 0
    assert "sensor-forecast  version 1  features > lstm > regress  float16" in capsys.readouterr().out
    inputs = [readings[0, :10].tolist(), readings[0].tolist()]
    outputs = served[0].infer("sensor-forecast", inputs, version=1).json()["outputs"]
    forecasts = forecaster.forecast(readings)[0]
    np.testing.assert_allclose([output["value"] for output in outputs], forecasts[[9, -1]], atol=ROUNDING)
