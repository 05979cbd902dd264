"""The embedded model sensor-forecast answers as PyTorch does, and its card and the README of the examples say what it does."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.ragged import Ragged
from service.modeling import spec, store
from service.modeling.encoder import Encoder

pytestmark = pytest.mark.usefixtures("examples")

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "models" / "sensor-forecast" / "1"
STEPS = 300


@pytest.fixture(scope="module")
def trained() -> Any:
    """The shipped model in plain PyTorch."""
    model, training = importlib.import_module("training.model"), importlib.import_module("training.recipe")
    encoder = importlib.import_module("training.recurrent").LSTMEncoder(3, 64, causal=True)
    shipped = model.Model(model.Raw(), encoder, 3).eval()
    shipped.load(FOLDER)
    fitted = importlib.import_module("training.fitting").Fitted(160, None, 0.0)
    return training.Trained(shipped, fitted, "", None, None)


def answer(rows: Any) -> Any:
    """Return the forecast of the row after these rows, as the service computes it."""
    model_spec = spec.read(FOLDER)
    encoder = Encoder(model_spec, store.read_arrays(FOLDER, model_spec), torch.device("cpu"))
    scores = encoder(Ragged(torch.from_numpy(rows), torch.tensor([0, len(rows)]))).head_output.scores
    assert scores is not None
    return scores[0].numpy()


def test_model_answers_as_pytorch_and_its_card_is_generated_by_the_script(trained: Any) -> None:
    """With the error of the shipped weights on the streams of the script, which is far below that of the last reading."""
    recipe = importlib.import_module("train_forecast").ExpectedRecipe()
    test = recipe.read_test(Path(), "")
    forecasts = recipe.answers(trained, test)
    for steps in (1, 2, 64, 65, STEPS):
        np.testing.assert_allclose(answer(test[0][:steps]), forecasts[0][steps - 1], atol=1e-4)
    quality = recipe.quality(test, forecasts)
    assert quality["error"] < 0.5 * quality["error_of_the_last_reading"]
    record = {"model": "sensor-forecast", "set": "sensors", "epoch": 160, "examples": len(test), "quality": quality}
    card = importlib.import_module("training.recipe").card
    parts = importlib.import_module("training.parts").Parts([], [], test)
    assert card(recipe, parts, trained, recipe.settings["lstm"], record, "") == (FOLDER / spec.CARD).read_text()


def test_examples_readme_shows_the_models_answer() -> None:
    readme = (ROOT / "examples" / "README.md").read_text()
    match = re.search(r"For the input\s+`(.+?)`\s+the\s+model\s+answers\s+`(.+?)`", readme)
    assert match
    forecast = answer(np.array(json.loads(match[1]), dtype=np.float32))
    np.testing.assert_allclose(json.loads(match[2])["value"], forecast, atol=0.001)
