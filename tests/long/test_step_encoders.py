"""Encoders of the recipes with a vector per step: padding, causality, and the same answers by the service."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.modeling import store
from service.modeling.spec import SequenceInput, TagHead
from tests.serving import Server, serving

pytestmark = pytest.mark.usefixtures("examples")

FAMILIES = ("sru", "qrnn", "lstm", "gru", "cnn", "tcn")
VOCABULARY, WIDTH, HIDDEN, LABELS, STEPS = 11, 5, 3, ("a", "b", "c", "d"), 40
ROUNDING = 2e-4
"""Difference of probabilities between two implementations in float32."""


def made(family: str, *, causal: bool, ids: bool = True) -> Any:
    torch.manual_seed(len(family) + causal)
    models, encoders = importlib.import_module("training.model"), importlib.import_module("training.encoders")
    inputs = models.Embedding(VOCABULARY, WIDTH) if ids else models.Raw()
    return models.Model(inputs, encoders.STEP_ENCODERS[family](WIDTH, HIDDEN, causal), len(LABELS)).eval()


def rows(ids: bool) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([1, STEPS, 17])
    return (torch.randint(VOCABULARY, (3, STEPS)) if ids else torch.randn(3, STEPS, WIDTH)), lengths


def written(models: Path, name: str, model: Any, ids: bool) -> Path:
    """Write a model with a label per step."""
    inputs: dict[str, Any] = {"vocabulary": VOCABULARY} if ids else {"features": WIDTH}
    inputs |= {"kind": "ids" if ids else "features", "max_steps": STEPS}
    head = TagHead(kind="tag", labels=LABELS)
    described = model.spec(name, "", SequenceInput.model_validate(inputs), head).model_copy(update={"precision": "float32"})
    store.write(models / name / "1", described, model.tensors(), card="made up")
    return models / name / "1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of models of all families, causal and not, over token ids and over vectors."""
    models = tmp_path_factory.mktemp("models")
    for family, causal, ids in product(FAMILIES, (False, True), (False, True)):
        written(models, name_of(family, causal, ids), made(family, causal=causal, ids=ids), ids)
    with serving(models, tmp_path_factory.mktemp("log")) as running:
        yield running


def name_of(family: str, causal: bool, ids: bool) -> str:
    return f"{family}-{'causal' if causal else 'whole'}-{'ids' if ids else 'vectors'}"


def answers(server: Server, body: dict[str, Any]) -> Any:
    reply = server.client.post("/infer", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["outputs"]


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "vectors"])
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_service_answers_each_step_as_the_model(server: Server, family: str, causal: bool, ids: bool) -> None:
    """PyTorch runs the sequences as a padded batch: the best label and its probability are the same at every step."""
    model, (inputs, lengths) = made(family, causal=causal, ids=ids), rows(ids)
    with torch.no_grad():
        expected = model(inputs, lengths).softmax(-1)
    sequences = [row[:length].tolist() for row, length in zip(inputs, lengths, strict=True)]
    outputs = answers(server, {"model": name_of(family, causal, ids), "inputs": sequences})
    for output, row, length in zip(outputs, expected, lengths, strict=True):
        best = row[:length].max(-1)
        np.testing.assert_allclose(output["scores"], best.values, atol=ROUNDING)
        margins = row[:length].sort(-1).values.diff(dim=-1)[:, -1]
        labels = zip(output["labels"], best.indices, margins, strict=True)
        assert all(label == LABELS[index] for label, index, margin in labels if margin > ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_models_answer_in_chunks(server: Server, family: str) -> None:
    """A session that receives the steps in chunks gets the answers of the whole sequence."""
    name, tokens = name_of(family, True, True), torch.randint(VOCABULARY, (STEPS,)).tolist()
    [whole] = answers(server, {"model": name, "inputs": [tokens]})
    scores: list[float] = []
    for first, last in ((0, 1), (1, 2), (2, 19), (19, STEPS)):
        [output] = answers(server, {"model": name, "session": name, "inputs": [tokens[first:last]], "end": last == STEPS})
        scores += output["scores"]
    np.testing.assert_allclose(scores, whole["scores"], atol=ROUNDING)
