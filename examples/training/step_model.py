"""A model with an output per step in plain PyTorch: its parameters as tensors of a model folder, and back."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from service.modeling import spec, store
from service.modeling.spec import EmbeddingLayer, Layer
from training.encoders import STEP_ENCODERS


class StepModel(nn.Module):
    """An encoder and a linear layer over each of its steps. Token ids are embedded, vectors are the encoder's inputs unchanged.

    vocabulary: the number of tokens, or None for vectors. width: of an embedding or of an input vector.
    """

    def __init__(
        self,
        family: str,
        vocabulary: int | None,
        width: int,
        hidden: int,
        outputs: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = None if vocabulary is None else nn.Embedding(vocabulary, width)
        self.encoder = STEP_ENCODERS[family](width, hidden, causal)
        self.head = nn.Linear(self.encoder.outputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, steps, outputs) of ids (rows, steps), or of vectors (rows, steps, width)."""
        vectors = inputs if self.embedding is None else self.embedding(inputs)
        scores: Tensor = self.head(self.dropout(self.encoder.steps(self.dropout(vectors), lengths)))
        return scores

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of model.toml."""
        if self.embedding is None:
            return self.encoder.layers
        return (EmbeddingLayer(kind="embedding", width=self.embedding.embedding_dim), *self.encoder.layers)

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters, in the names and layouts of the model folder."""
        embedding = {} if self.embedding is None else {"layers.0.weight": self.embedding.weight}
        head = {"head.weight": self.head.weight.T, "head.bias": self.head.bias}
        return {**embedding, **self.encoder.tensors(len(embedding)), **head}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Replace the parameters by those in a version folder, as float32."""
        arrays = store.read_arrays(folder, spec.read(folder))
        for name, view in self.tensors().items():
            view.copy_(arrays[name])
