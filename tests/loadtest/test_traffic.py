"""Traffic is realistic and reproducible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.traffic import Traffic, words
from service.modeling import spec
from service.modeling.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parent.parent.parent / "models" / "question-type-cnn" / "1"
TEXT = {"kind": "text", "vocabulary": 50, "max_steps": 512}
FEATURES = {"kind": "features", "features": 3, "max_steps": 512}


def model(input: dict[str, Any]) -> dict[str, Any]:
    return {"name": "synthetic", "version": "2", "input": input, "min_steps": 1}


@pytest.mark.parametrize("input", [TEXT, FEATURES, {**TEXT, "kind": "ids"}])
def test_requests_depend_only_on_the_seed(input: dict[str, Any]) -> None:
    bodies = [[Traffic(model(input), ["far", "sea"], seed).body(3) for _ in range(5)] for seed in (1, 1, 2)]
    assert bodies[0] == bodies[1] != bodies[2]
    assert all((body["model"], body["version"], len(body["inputs"])) == ("synthetic", "2", 3) for body in bodies[0])


def test_inputs_have_the_kind_and_length_that_is_asked_for() -> None:
    features, ids = Traffic(model(FEATURES)), Traffic(model(TEXT))
    rows: Any = features.input(4)
    assert (str(features), [len(row) for row in rows]) == ("rows of 3 numbers", [3] * 4)
    assert str(ids) == "token ids" and {id for _ in range(200) for id in ids.input()} == set(range(50))
    tokenizer = Tokenizer.read(MODEL, spec.read(MODEL))
    texts = Traffic(model(TEXT), words((MODEL / "tokenizer.json").read_text()))
    assert [len(tokenizer.packed_ids(str(texts.input(steps)), "inputs[0]")) // 4 for steps in (1, 7, 49)] == [1, 7, 49]
