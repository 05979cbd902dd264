"""A classifier of texts in plain PyTorch: its parameters as tensors of a model folder, and back."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from service.modeling import spec, store
from service.modeling.spec import ClassifyHead, EmbeddingLayer, ModelSpec, SequenceInput
from training.encoders import ENCODERS
from training.vocabulary import TokenisedText, batches

ROWS = 50
"""Rows of a batch that is only evaluated."""


class Classifier(nn.Module):
    """An embedding, an encoder with maximum over time, and a linear layer."""

    def __init__(
        self, encoder: str, vocabulary: int, width: int, hidden: int, labels: tuple[str, ...], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.labels = labels
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.uniform_(self.embedding.weight, -0.25, 0.25)
        self.encoder = ENCODERS[encoder](width, hidden)
        self.head = nn.Linear(self.encoder.outputs, len(labels))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        encoded = self.encoder(self.dropout(self.embedding(tokens)), lengths)
        scores: Tensor = self.head(self.dropout(encoded))
        return scores

    @torch.no_grad()
    def predictions(self, rows: list[TokenisedText]) -> list[str]:
        """Return the label with the highest score of each row."""
        scored = [self(batch.tokens, batch.lengths).argmax(1) for batch in (b.to(self.device) for b in batches(rows, ROWS))]
        return [self.labels[index] for index in torch.cat(scored).tolist()]

    def accuracy(self, rows: list[TokenisedText]) -> float:
        """Return the percentage of rows with the correct prediction."""
        predicted = self.predictions(rows)
        right = [row.label >= 0 and label == self.labels[row.label] for row, label in zip(rows, predicted, strict=True)]
        return 100 * sum(right) / len(right)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters, in the names and layouts of the model folder."""
        head = {"head.weight": self.head.weight.T, "head.bias": self.head.bias}
        return {"layers.0.weight": self.embedding.weight, **self.encoder.tensors(1), **head}

    def spec(self, name: str, description: str, max_steps: int) -> ModelSpec:
        vocabulary, width = self.embedding.weight.shape
        return ModelSpec(
            name=name,
            description=description,
            precision="float16",
            input=SequenceInput(kind="text", vocabulary=vocabulary, max_steps=max_steps),
            layers=(EmbeddingLayer(kind="embedding", width=width), *self.encoder.layers),
            head=ClassifyHead(kind="classify", pool=("max",), labels=self.labels),
        )


@torch.no_grad()
def read_back(folder: Path, encoder: str, hidden: int) -> Classifier:
    """Return the model in a version folder, in float32."""
    described = spec.read(folder)
    embedding, head = described.layers[0], described.head
    assert isinstance(embedding, EmbeddingLayer) and isinstance(head, ClassifyHead)
    model = Classifier(encoder, described.input.vocabulary or 0, embedding.width, hidden, tuple(head.labels)).eval()
    arrays = store.read_arrays(folder, described)
    for name, view in model.tensors().items():
        view.copy_(arrays[name])
    return model
