"""The baselines are fair: with the same weights, they return the same scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.baselines.classifier import MODEL_VARIABLE, TextClassifier, load
from loadtest.comparison import models
from loadtest.generator.readers import TOLERANCE
from loadtest.traffic import Traffic, words
from service import local
from service.settings import Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compared")
    models.write(root)
    return root


@pytest.mark.parametrize("name", models.MODELS)
def test_baselines_return_the_scores_of_the_service(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = folder / name / "1"
    description = {"name": name, "version": "1", "min_steps": 1, "input": {"kind": "text", "max_steps": 512}}
    known = words((version / "tokenizer.json").read_text())
    texts = ["Who wrote Hamlet ?", "What", *Traffic(description, known[-500:]).body(20)["inputs"]]
    compared = TextClassifier(version)
    ours = [list(output["scores"].values()) for output in local.infer(Settings(device="cpu", models=folder), name, texts)]
    assert max(map(max, ours)) - min(map(min, ours)) > 100 * TOLERANCE, "wrong scores would be noticed"
    for expected, batched, text in zip(ours, compared.scores(texts), texts, strict=True):
        assert batched == pytest.approx(expected, abs=TOLERANCE / 10)
        assert compared.scores([text])[0] == pytest.approx(expected, abs=TOLERANCE / 10)
    monkeypatch.setenv(MODEL_VARIABLE, str(version))
    assert load()(texts[:1])[0] == pytest.approx(ours[0], abs=TOLERANCE / 10)
