"""Traffic is realistic and reproducible."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kernels.bench.questions import COUNTS, SHORTEST
from loadtest.traffic import Traffic, words
from service.modeling import spec
from service.modeling.tokenizer import Tokenizer
from tests import models

MODELS = Path(__file__).resolve().parent.parent.parent / "models"
TEXT = {"kind": "text", "vocabulary": 50, "max_steps": 512}
FEATURES = {"kind": "features", "features": 3, "max_steps": 512}


def model(input: dict[str, Any], min_steps: int = 1) -> dict[str, Any]:
    return {"name": "synthetic", "version": "2", "input": input, "min_steps": min_steps}


@pytest.mark.parametrize("input", [TEXT, FEATURES, {**TEXT, "kind": "ids"}])
def test_requests_depend_only_on_the_seed(input: dict[str, Any]) -> None:
    bodies = [[Traffic(model(input), ["far", "sea"], seed).body(3) for _ in range(5)] for seed in (1, 1, 2)]
    assert bodies[0] == bodies[1] != bodies[2]
    assert json.loads(json.dumps(bodies[0])) == bodies[0]


def test_body_has_model_version_and_inputs() -> None:
    body = Traffic(model(TEXT), ["far"]).body(10)
    assert (body["model"], body["version"], len(body["inputs"])) == ("synthetic", "2", 10)


def test_lengths_follow_real_questions() -> None:
    source, draws = Traffic(model(TEXT)), 10_000
    drawn = Counter(source.steps() for _ in range(draws))
    common = {steps: draws * count / sum(COUNTS) for steps, count in enumerate(COUNTS, SHORTEST) if count > 5}
    assert sum(drawn[steps] for steps in common) > 0.99 * draws
    chi_square = sum((drawn[steps] - expected) ** 2 / expected for steps, expected in common.items())
    assert chi_square < 2 * len(common)


def test_lengths_stay_within_the_limits_of_the_model() -> None:
    source = Traffic(model({**TEXT, "max_steps": 9}, min_steps=6))
    assert {source.steps() for _ in range(1000)} == {6, 7, 8, 9}


def test_input_may_have_a_fixed_number_of_steps() -> None:
    source = Traffic(model(FEATURES))
    assert [len(source.input(steps)) for steps in (1, 300)] == [1, 300]


def test_features_are_rows_with_the_width_of_the_model() -> None:
    source = Traffic(model(FEATURES, min_steps=4))
    assert str(source) == "rows of 3 numbers"
    rows = source.input()
    assert isinstance(rows, list)
    assert len(rows) >= 4
    assert all(isinstance(row, list) and len(row) == 3 for row in rows)


def test_text_model_without_words_gets_token_ids() -> None:
    source = Traffic(model(TEXT))
    assert str(source) == "token ids"
    ids = list(itertools.chain.from_iterable(source.body(200)["inputs"]))
    assert set(ids) == set(range(50))


@pytest.mark.parametrize("name", ["question-type-cnn", "question-type-lstm", "question-type-sru"])
def test_text_has_the_drawn_number_of_tokens(name: str) -> None:
    folder = MODELS / name / "1"
    tokenizer = Tokenizer.read(folder, spec.read(folder))
    source = Traffic(model(TEXT), words((folder / "tokenizer.json").read_text()))
    assert str(source) == "texts"
    for _ in range(50):
        text = source.input()
        assert isinstance(text, str)
        assert len(tokenizer.packed_ids(text, "inputs[0]")) // 4 == len(text.split())


def test_words_are_known_single_tokens_in_order() -> None:
    assert words(models.tokenizer()) == sorted(set(models.WORDS) - {"[UNK]"})
