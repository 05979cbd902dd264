"""Reference classifiers in plain PyTorch, in float64 and one row at a time, with their weights in the layout of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from service.modeling.spec import EmbeddingLayer, ModelSpec
from tests.modeling.reference_layers import FEATURES, VOCABULARY, WIDTH, Form, ReferenceLayer, last

LABELS = ("near", "far", "unknown")


class Expected(NamedTuple):
    """scores: (labels,); pooled: (width,); steps: (steps, width)."""

    scores: Tensor
    pooled: Tensor
    steps: Tensor


class ReferenceModel(nn.Module):
    """A classifier: an optional embedding, layers, a pool and a linear layer. Runs one row at a time."""

    def __init__(self, forms: Sequence[Form], *, embedded: bool, pool: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        widths = [WIDTH if embedded else FEATURES, *(form.spec.outputs for form in forms)]
        self.forms, self.pool = forms, pool
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if embedded else None
        self.linear = nn.Linear(widths[-1], len(LABELS))
        self.layers = nn.ModuleList(
            form.reference(width, seed + index) for index, (form, width) in enumerate(zip(forms, widths, strict=False))
        )

    def forward(self, row: Tensor) -> Expected:
        """row: (steps,) ids or (steps, features)."""
        steps = row.double() if self.embedding is None else self.embedding(row.long())
        for layer in self.layers:
            steps = layer(steps)
        pooled = {"last": last(steps, self.forms[-1].spec), "mean": steps.mean(0), "max": steps.amax(0)}[self.pool]
        return Expected(self.linear(pooled).softmax(0), pooled, steps)

    def spec(self, precision: str = "float32") -> ModelSpec:
        over_ids = self.embedding is not None
        kind = {"kind": "ids", "vocabulary": VOCABULARY} if over_ids else {"kind": "features", "features": FEATURES}
        layers = [form.spec for form in self.forms]
        return ModelSpec.model_validate(
            {
                "name": "reference",
                "precision": precision,
                "input": {**kind, "max_steps": 64},
                "layers": [EmbeddingLayer(kind="embedding", width=WIDTH), *layers] if over_ids else layers,
                "head": {"kind": "classify", "pool": self.pool, "labels": LABELS},
            }
        )

    def arrays(self) -> dict[str, Tensor]:
        """Return the weights in the names and layout of a model folder."""
        arrays: dict[str, Tensor] = {"head.weight": self.linear.weight.T, "head.bias": self.linear.bias}
        if self.embedding is not None:
            arrays["layers.0.weight"] = self.embedding.weight
        for index, layer in enumerate(self.layers, start=0 if self.embedding is None else 1):
            assert isinstance(layer, ReferenceLayer)
            arrays |= {f"layers.{index}.{name}": array for name, array in layer.named().items()}
        return {name: array.detach().float() for name, array in arrays.items()}


def reference_model(*forms: Form, embedded: bool = True, pool: str = "max", seed: int = 0) -> ReferenceModel:
    """Return a classifier with these layers, or with one LSTM by default."""
    made = ReferenceModel(forms or (Form("lstm"),), embedded=embedded, pool=pool, seed=seed)
    made.requires_grad_(False).double()
    return made
