"""Encoders of the recipes with a vector per step: padding, causality, and the same answers by the service."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import pairwise, product
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


def made(family: str, *, causal: bool) -> Any:
    torch.manual_seed(len(family) + causal)
    models, encoders = importlib.import_module("training.model"), importlib.import_module("training.encoders")
    inputs = models.Embedding(VOCABULARY, WIDTH)
    return models.Model(inputs, encoders.STEP_ENCODERS[family](WIDTH, HIDDEN, causal), len(LABELS)).eval()


def written(models: Path, name: str, model: Any) -> None:
    """Write a model with a label per step."""
    inputs = SequenceInput.model_validate({"kind": "ids", "vocabulary": VOCABULARY, "max_steps": STEPS})
    described = model.spec(name, "", inputs, TagHead(kind="tag", labels=LABELS)).model_copy(update={"precision": "float32"})
    store.write(models / name / "1", described, model.tensors(), card="made up")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of models of all families, causal and not."""
    models = tmp_path_factory.mktemp("models")
    for family, causal in product(FAMILIES, (False, True)):
        written(models, name_of(family, causal), made(family, causal=causal))
    with serving(models, tmp_path_factory.mktemp("log")) as running:
        yield running


def name_of(family: str, causal: bool) -> str:
    return f"{family}-{'causal' if causal else 'whole'}"


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_service_answers_each_step_as_the_model(server: Server, family: str, causal: bool) -> None:
    """PyTorch runs the sequences as a padded batch: the best probability is the same at every step. Causal models answer in chunks too."""
    name, lengths = name_of(family, causal), torch.tensor([1, STEPS, 17])
    inputs = torch.randint(VOCABULARY, (3, STEPS))
    with torch.no_grad():
        expected = made(family, causal=causal)(inputs, lengths).softmax(-1)
    sequences = [row[:length].tolist() for row, length in zip(inputs, lengths, strict=True)]
    for output, row, length in zip(server.infer(name, sequences).json()["outputs"], expected, lengths, strict=True):
        np.testing.assert_allclose(output["scores"], row[:length].max(-1).values, atol=ROUNDING)
    if causal:
        scores: list[float] = []
        for first, last in pairwise((0, 1, 2, 19, STEPS)):
            reply = server.infer(name, [sequences[1][first:last]], session=name, end=last == STEPS)
            scores += reply.json()["outputs"][0]["scores"]
        np.testing.assert_allclose(scores, expected[1].max(-1).values, atol=ROUNDING)
