"""The model sensor-forecast: the script that makes it, and that the folder which is shipped is what its card says."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.contract import Ragged
from service.cli import main
from service.ipc.messages import FIRST, ZEROS
from service.modeling import spec, store
from service.modeling.encoder import Encoder
from service.modeling.memory import Places
from tests.serving import serving

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "models" / "sensor-forecast" / "1"
SMALL = ["--hidden", "4", "--rounds", "1", "--streams", "4", "--batch", "2", "--chunk", "512"]
STEPS = 300
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """`examples/train_sensors.py`, which judges one seed of few streams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        module = importlib.import_module("train_sensors")
        patch.setattr(module, "SEEDS", 1)
        patch.setattr(module, "JUDGED", 2)
        yield module


@pytest.fixture(scope="module")
def forecaster(example: Any) -> Any:
    """The shipped model in plain PyTorch."""
    return example.read_back(FOLDER)


@pytest.fixture(scope="module")
def readings(example: Any) -> Any:
    """(1, STEPS, 3): a stream that nobody was trained on."""
    return example.streams((example.TEST, 0), 1, STEPS)


@pytest.fixture
def encoder() -> Encoder:
    """The shipped model as the service runs it."""
    described = spec.read(FOLDER)
    return Encoder(described, store.read_arrays(FOLDER, described), torch.device("cpu"), fold_limit_bytes=0)


def answer(encoder: Encoder, rows: Any, places: Places | None = None) -> Any:
    """The forecast of what comes after these rows."""
    scores = encoder(Ragged(torch.from_numpy(rows), torch.tensor([0, len(rows)])), places=places).verdict.scores
    assert scores is not None
    return scores[0].numpy()


def card_table() -> str:
    """The first table of the card, which is its result."""
    found = re.search(r"(^\|.+\|\n)+", (FOLDER / spec.CARD).read_text(), re.MULTILINE)
    assert found
    return found[0].strip()


def card_figures() -> dict[str, list[float]]:
    """The rows of the card's result, by what forecasts: each channel, all, and of these the lowest and the highest seed."""
    rows = re.findall(r"^\| (\S.+?) \| (\d.+\)) \|$", card_table(), re.MULTILINE)
    return {name.strip("*"): [float(figure) for figure in re.findall(r"\d\.\d+", figures)] for name, figures in rows}


def test_a_seed_gives_the_same_streams_and_another_one_others(example: Any) -> None:
    one, same, other = (example.streams(seed, 2, 50) for seed in ((1, 2), (1, 2), (2, 2)))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    assert one.shape == (2, 50, len(example.CHANNELS)) and one.dtype == np.float32


def test_a_training_writes_a_folder_that_is_served(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main([*SMALL, "--models", str(tmp_path)]) == 0
    assert "| **sensor-forecast** | " in capsys.readouterr().out
    card = (tmp_path / "sensor-forecast" / "1" / spec.CARD).read_text()
    assert "--hidden 4 --rounds 1" in card and "$" not in card
    with serving(tmp_path, tmp_path) as server:
        [output] = server.infer("sensor-forecast", [[[0.1, 0.2, 0.3], [0.2, 0.3, 0.4]]]).json()["outputs"]
    assert [type(value) for value in output["value"]] == [float] * 3


def test_one_training_gives_the_same_weights_each_time(example: Any) -> None:
    settings = example.Settings(hidden=4, rounds=1, streams=4, batch=2)
    one, same = (example.train(settings).tensors() for _ in range(2))
    assert all(torch.equal(one[name], same[name]) for name in one)


def test_settings_are_judged_without_a_folder(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert example.main([*SMALL, "--holdout"]) == 0
    assert "| the last reading again | " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_model_beats_both_baselines_as_its_card_says(example: Any, forecaster: Any) -> None:
    """On the first of the card's seeds, whose error of all channels lies between the lowest and the highest of the card."""
    said = card_figures()
    ways = forecaster.forecast, *example.baselines().values()
    ours, *theirs = (example.errors_by_seed(way, [(example.TEST, 0)], 32, example.STEPS + 1)[0] for way in ways)
    for name, found in zip(said, (ours, *theirs), strict=False):
        *_, lowest, highest = said[name]
        assert lowest - 0.001 < found[-1] < highest + 0.001, name
    for others in theirs:
        assert (ours < others).all()


def test_the_shipped_card_is_what_the_script_writes(example: Any) -> None:
    assert (FOLDER / spec.CARD).read_text() == example.card(example.Settings(), card_table())


def test_the_card_says_of_every_channel_that_the_model_is_better() -> None:
    ours, *theirs, _ = card_figures().values()
    assert len(theirs) == 2
    for others in theirs:
        assert all(one < other for one, other in zip(ours, others, strict=True))


def test_the_answer_after_any_number_of_readings_is_the_forecast_of_the_next(
    encoder: Encoder, forecaster: Any, readings: Any
) -> None:
    forecasts = forecaster.forecast(readings)[0]
    for steps in (1, 2, 64, 65, STEPS):
        np.testing.assert_allclose(answer(encoder, readings[0, :steps]), forecasts[steps - 1], atol=ROUNDING)


def test_a_stream_may_come_in_chunks(encoder: Encoder, readings: Any) -> None:
    assert encoder.streams
    encoder.remember(places=FIRST + 1)
    whole = answer(encoder, readings[0])
    for source, (begin, end) in zip((ZEROS, FIRST, FIRST), ((0, 5), (5, 6), (6, STEPS)), strict=True):
        places = Places(torch.tensor([source], dtype=torch.int32), torch.tensor([FIRST], dtype=torch.int32))
        last = answer(encoder, readings[0, begin:end], places)
    np.testing.assert_allclose(last, whole, atol=ROUNDING)


def test_the_readme_shows_its_answer_and_its_error(encoder: Encoder) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"asked about\s`(.+?)` it answers `(.+?)`", readme)
    assert shown
    given = answer(encoder, np.array(json.loads(shown[1]), dtype=np.float32))
    np.testing.assert_allclose(json.loads(shown[2])["value"], given, atol=0.001)
    errors = re.search(r"held-out streams is (\S+);.+\n.+ is (\S+), and that of the last reading again (\S+)\.\n", readme)
    assert errors
    ours, last_reading, regression, _ = (figures[-3] for figures in card_figures().values())
    assert [float(error) for error in errors.groups()] == [ours, regression, last_reading]


def test_the_shipped_model_is_listed_and_served(
    forecaster: Any, readings: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--models", str(ROOT / "models")]) == 0
    assert "sensor-forecast  version 1  features > lstm > regress  float16" in capsys.readouterr().out
    with serving(ROOT / "models", tmp_path) as server:
        outputs = server.infer("sensor-forecast", [readings[0, :10].tolist(), readings[0].tolist()]).json()["outputs"]
    forecasts = forecaster.forecast(readings)[0]
    np.testing.assert_allclose([output["value"] for output in outputs], forecasts[[9, -1]], atol=ROUNDING)
