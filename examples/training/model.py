"""The model that every recipe trains: inputs as vectors, an encoder and a linear layer. Written to a model folder and read back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn

from service.modeling import spec, store
from service.modeling.spec import ModelSpec, SequenceInput
from service.modeling.spec.heads import Head
from service.modeling.spec.layers import BatchNormLayer, EmbeddingLayer, Layer
from training.batches import Row, batches
from training.encoder import Encoder

EPSILON = BatchNormLayer(kind="batch_norm").epsilon


class Inputs(nn.Module, ABC):
    """Turns the inputs of a model into the vectors that its encoder reads."""

    @property
    @abstractmethod
    def layers(self) -> tuple[Layer, ...]:
        """The first layers of model.toml."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters, in the names and layouts of the model folder."""


class Embedding(Inputs):
    """Vectors of token ids. bound: the vectors start between -bound and bound; without it, they start from a normal distribution."""

    def __init__(self, vocabulary: int, width: int, *, dropout: float = 0.0, bound: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        if bound is not None:
            nn.init.uniform_(self.table.weight, -bound, bound)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        vectors: Tensor = self.dropout(self.table(tokens))
        return vectors

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (EmbeddingLayer(kind="embedding", width=self.table.embedding_dim),)

    def tensors(self) -> dict[str, Tensor]:
        return {"layers.0.weight": self.table.weight}


class Scaled(Inputs):
    """Rows of numbers, scaled by the mean and the variance of the columns of the training rows, so that clients send raw rows.

    rows: (any, columns), of the training part.
    """

    norm: Tensor
    """(4, columns): gain, offset, mean and variance, as in the model folder."""

    layers = (BatchNormLayer(kind="batch_norm"),)

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        ones, zeros = torch.ones(rows.shape[1]), torch.zeros(rows.shape[1])
        self.register_buffer("norm", torch.stack([ones, zeros, rows.mean(0), rows.var(0, correction=0)]).half().float())

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        gain, offset, mean, variance = self.norm
        scaled: Tensor = gain * (rows - mean) / (variance + EPSILON).sqrt() + offset
        return scaled

    def tensors(self) -> dict[str, Tensor]:
        return {"layers.0.norm": self.norm}


class Raw(Inputs):
    """Rows of numbers as they are."""

    layers = ()

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        return rows

    def tensors(self) -> dict[str, Tensor]:
        return {}


class Model(nn.Module):
    """A linear layer over each step of an encoder or, if it is pooled, over one vector for the sequence."""

    def __init__(self, inputs: Inputs, encoder: Encoder, outputs: int, *, pooled: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.inputs, self.encoder, self.pooled = inputs, encoder, pooled
        self.head = nn.Linear(encoder.outputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, outputs) or (rows, steps, outputs) of ids (rows, steps) or numbers (rows, steps, columns)."""
        vectors = self.inputs(inputs, lengths)
        encoded = self.encoder(vectors, lengths) if self.pooled else self.encoder.steps(vectors, lengths)
        scores: Tensor = self.head(self.dropout(encoded))
        return scores

    @torch.no_grad()
    def scores(self, inputs: list[Tensor], size: int = 32) -> list[Tensor]:
        """Return the scores of each sequence, (outputs,) or (its steps, outputs)."""
        found = []
        for batch in batches([Row(each, torch.zeros(1)) for each in inputs], size):
            rows = self(batch.inputs.to(self.device), batch.lengths.to(self.device)).cpu()
            found += list(rows) if self.pooled else [row[:length] for row, length in zip(rows, batch.lengths, strict=True)]
        return found

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters, in the names and layouts of the model folder."""
        head = {"head.weight": self.head.weight.T, "head.bias": self.head.bias}
        return {**self.inputs.tensors(), **self.encoder.tensors(len(self.inputs.layers)), **head}

    def spec(self, name: str, description: str, inputs: SequenceInput, head: Head) -> ModelSpec:
        layers = (*self.inputs.layers, *self.encoder.layers)
        return ModelSpec(name=name, description=description, precision="float16", input=inputs, layers=layers, head=head)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Replace the parameters by those in a version folder, as float32."""
        arrays = store.read_arrays(folder, spec.read(folder))
        for name, view in self.tensors().items():
            view.copy_(arrays[name])
