"""Traffic is realistic and reproducible."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kernels.bench.questions import COUNTS, SHORTEST
from loadtest.traffic import Traffic, words
from service.modeling import spec
from service.modeling.tokenizer import Tokenizer

MODELS = Path(__file__).resolve().parent.parent.parent / "models"
TEXT = {"kind": "text", "vocabulary": 50, "max_steps": 512}
FEATURES = {"kind": "features", "features": 3, "max_steps": 512}


def model(input: dict[str, Any], min_steps: int = 1) -> dict[str, Any]:
    return {"name": "synthetic", "version": "2", "input": input, "min_steps": min_steps}


@pytest.mark.parametrize("input", [TEXT, FEATURES, {**TEXT, "kind": "ids"}])
def test_requests_depend_only_on_the_seed(input: dict[str, Any]) -> None:
    bodies = [[Traffic(model(input), ["far", "sea"], seed).body(3) for _ in range(5)] for seed in (1, 1, 2)]
    assert bodies[0] == bodies[1] != bodies[2]
    assert all((body["model"], body["version"], len(body["inputs"])) == ("synthetic", "2", 3) for body in bodies[0])


def test_lengths_follow_real_questions() -> None:
    source, draws = Traffic(model(TEXT)), 10_000
    drawn = Counter(source.steps() for _ in range(draws))
    common = {steps: draws * count / sum(COUNTS) for steps, count in enumerate(COUNTS, SHORTEST) if count > 5}
    chi_square = sum((drawn[steps] - expected) ** 2 / expected for steps, expected in common.items())
    assert chi_square < 2 * len(common)


def test_kind_of_input_follows_the_model() -> None:
    features, ids = Traffic(model(FEATURES)), Traffic(model(TEXT))
    rows: Any = features.input(4)
    assert (str(features), [len(row) for row in rows]) == ("rows of 3 numbers", [3] * 4)
    assert str(ids) == "token ids" and {id for _ in range(200) for id in ids.input()} == set(range(50))


@pytest.mark.parametrize("name", ["question-type-cnn", "question-type-lstm", "question-type-sru"])
def test_text_has_the_drawn_number_of_tokens(name: str) -> None:
    folder = MODELS / name / "1"
    tokenizer = Tokenizer.read(folder, spec.read(folder))
    source = Traffic(model(TEXT), words((folder / "tokenizer.json").read_text()))
    for steps in range(1, 50):
        assert len(tokenizer.packed_ids(str(source.input(steps)), "inputs[0]")) // 4 == steps
