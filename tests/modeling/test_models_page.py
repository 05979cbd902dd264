"""docs/models.md describes every layer, head, key, tensor and activation of a model.toml, and nothing else is needed to write one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from kernels.ragged import Ragged
from service.modeling.encoder import Encoder
from service.modeling.spec import Head, Layer, ModelSpec, SequenceInput
from service.modeling.spec.activations import PARAMETERS, Gated, Kind
from service.modeling.spec.heads import HeadDense
from tests import models

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \|(.*)$", re.MULTILINE)
LAYERS = {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(get_args(Layer)[0])}
HEADS = {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(get_args(Head)[0])}
FEATURES = {"kind": "features", "features": 6, "max_steps": 50}
STEPS = np.random.default_rng(1).normal(size=(9, 6))


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("kind", [*LAYERS, *HEADS])
def test_page_names_every_key_and_its_default(kind: str) -> None:
    described = " ".join(row for name, row in ROW.findall(PAGE) if name == kind)
    assert described, f"docs/models.md has no row for {kind}"
    for name, field in (LAYERS | HEADS)[kind].model_fields.items():
        assert name in words(PAGE), f"docs/models.md lacks {name} of {kind}"
        default = field.get_default(call_default_factory=True)
        if name in words(described) and isinstance(default, bool | int | float) and not field.is_required():
            written = str(default).lower() if isinstance(default, bool) else f"{default:g}".replace("e-0", "e-")
            forms = f"`{name}` ({written})", f"`{name}` ({written}.0)"
            assert any(form in described for form in forms), f"docs/models.md has another default of {name} of {kind}"


@pytest.mark.parametrize("table", [ModelSpec, SequenceInput, HeadDense])
def test_page_names_every_other_key(table: Any) -> None:
    assert set(table.model_fields) <= words(PAGE)


def test_page_names_every_activation_and_its_parameters() -> None:
    section = PAGE[PAGE.index("### Activations") : PAGE.index("## Heads")]
    assert {*get_args(Kind)} <= words(section) and {*get_args(Gated)} <= words(PAGE)
    for name, parameters in PARAMETERS.items():
        row = next(line for line in section.splitlines() if line.startswith(f"| {name} "))
        assert all(f"{value:g}" in row for value in parameters.values()), row


def sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


def computed(tmp_path: Path, *layers: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the steps of a model with these layers, and its tensors."""
    spec = models.made_up(tmp_path, "described", FEATURES, *layers, head={"kind": "sequence"})
    weights = models.weights(spec, seed=1)
    x = Ragged(torch.tensor(STEPS, dtype=torch.float32), torch.tensor([0, len(STEPS)]))
    sequence = Encoder(spec, weights, torch.device("cpu"))(x, sequence=True).sequence
    assert sequence is not None
    return sequence.numpy(), {name: tensor.double().numpy() for name, tensor in weights.items()}


def test_sru_is_as_described(tmp_path: Path) -> None:
    """Each direction has its own projection and its own half of the input as its skip."""
    sru = {"kind": "sru", "hidden": 3, "bidirectional": True, "scale": 1.7, "projection": 2, "layer_norm": "before"}
    actual, tensors = computed(tmp_path, sru)
    gain, offset = tensors["layers.0.0.norm"]
    joined = []
    for number, direction in enumerate(("forward", "backward")):
        projection, blocks, bias, cell = (
            tensors[f"layers.0.0.{direction}.{name}"] for name in ("projection", "input", "bias", "cell")
        )
        c, outputs = np.zeros(3), []
        for x in STEPS[:: -1 if number else 1]:
            normalised = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * gain + offset
            z, f, r = np.split(normalised @ projection @ blocks, 3)
            f, r = sigmoid(f + cell[:3] * c + bias[:3]), sigmoid(r + cell[3:] * c + bias[3:])
            c = f * c + (1 - f) * z
            outputs.append(r * c + (1 - r) * 1.7 * x[3 * number : 3 * number + 3])
        joined.append(outputs[:: -1 if number else 1])
    np.testing.assert_allclose(actual, np.hstack(joined), atol=1e-5)


def test_qrnn_is_as_described(tmp_path: Path) -> None:
    """The window of the backward direction reads the steps after the current step."""
    actual, tensors = computed(tmp_path, {"kind": "qrnn", "hidden": 4, "window": 3, "pooling": "ifo", "direction": "backward"})
    taps, bias = tensors["layers.0.0.backward.input"], tensors["layers.0.0.backward.bias"]
    c, expected = np.zeros(4), np.zeros_like(actual)
    for t in reversed(range(len(STEPS))):
        z, f, o, i = np.split(bias + sum(STEPS[t + j] @ taps[j] for j in range(3) if t + j < len(STEPS)), 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(z)
        expected[t] = sigmoid(o) * c
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_convolution_is_as_described(tmp_path: Path) -> None:
    """`same` with an odd number of zeros has one more on the right."""
    actual, tensors = computed(tmp_path, {"kind": "conv", "filters": 5, "width": 4, "activation": "none"})
    padded = np.vstack([np.zeros((1, 6)), STEPS, np.zeros((2, 6))])
    filters, bias = tensors["layers.0.filters"], tensors["layers.0.bias"]
    expected = [bias + sum(padded[t + k] @ filters[k] for k in range(4)) for t in range(len(STEPS))]
    np.testing.assert_allclose(actual, expected, atol=1e-5)
