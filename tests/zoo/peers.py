"""The same models in plain PyTorch, and their weights in our layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from service.zoo.spec import ClassifyHead, EmbeddingLayer, LSTMLayer, ModelSpec, SequenceInput

LABELS = ("near", "far", "unknown")
VOCABULARY, WIDTH, HIDDEN, FEATURES = 13, 7, 5, 3


class Peer(nn.Module):
    """Embedding (when there is a vocabulary), LSTM and linear layer for one sequence at a time."""

    def __init__(self, *, embedded: bool, depth: int, bidirectional: bool, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if embedded else None
        self.lstm = nn.LSTM(WIDTH if embedded else FEATURES, HIDDEN, depth, bidirectional=bidirectional)
        self.linear = nn.Linear(HIDDEN * (1 + bidirectional), len(LABELS))

    def forward(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, pooled vector and steps of (steps,) ids or (steps, features) rows."""
        steps, (hidden, _) = self.lstm(row if self.embedding is None else self.embedding(row.long()))
        last = hidden[-2:].flatten() if self.lstm.bidirectional else hidden[-1]
        pooled = {"last": last, "mean": steps.mean(0), "max": steps.amax(0)}[self.pool]
        return self.linear(pooled).softmax(0), pooled, steps

    def spec(self) -> ModelSpec:
        lstm = LSTMLayer(kind="lstm", hidden=HIDDEN, depth=self.lstm.num_layers, bidirectional=bool(self.lstm.bidirectional))
        embedding = EmbeddingLayer(kind="embedding", width=WIDTH)
        inputs = (
            {"kind": "features", "features": FEATURES} if self.embedding is None else {"kind": "ids", "vocabulary": VOCABULARY}
        )
        return ModelSpec(
            name="peer",
            precision="float32",
            input=SequenceInput.model_validate({**inputs, "max_steps": 64}),
            layers=(lstm,) if self.embedding is None else (embedding, lstm),
            head=ClassifyHead.model_validate({"kind": "classify", "pool": self.pool, "labels": LABELS}),
        )

    def arrays(self) -> dict[str, Tensor]:
        """The weights under the names and in the layout of a model folder."""
        head = {"head.weight": self.linear.weight.detach().T, "head.bias": self.linear.bias.detach()}
        if self.embedding is None:
            return head | stack_arrays(self.lstm, "layers.0.")
        return head | stack_arrays(self.lstm, "layers.1.") | {"layers.0.weight": self.embedding.weight.detach()}


def peer(*, embedded: bool = True, depth: int = 1, bidirectional: bool = False, pool: str = "max", seed: int = 0) -> Peer:
    torch.manual_seed(seed)
    return Peer(embedded=embedded, depth=depth, bidirectional=bidirectional, pool=pool)


def stack_arrays(lstm: nn.LSTM, prefix: str = "") -> dict[str, Tensor]:
    """torch.nn.LSTM's weights transposed and its two biases added; the gate order is ours."""
    held, arrays = lstm.state_dict(), {}
    for level in range(lstm.num_layers):
        for direction, suffix in (("forward", ""), ("backward", "_reverse"))[: 1 + lstm.bidirectional]:
            at = f"l{level}{suffix}"
            arrays[f"{prefix}{level}.{direction}.input"] = held[f"weight_ih_{at}"].T
            arrays[f"{prefix}{level}.{direction}.recurrent"] = held[f"weight_hh_{at}"].T
            arrays[f"{prefix}{level}.{direction}.bias"] = held[f"bias_ih_{at}"] + held[f"bias_hh_{at}"]
    return arrays


def made_up_rows(lengths: Sequence[int], *, embedded: bool, seed: int = 0) -> Tensor:
    """Tokens for rows of these lengths: ids, or rows of features."""
    generator = torch.Generator().manual_seed(seed)
    if embedded:
        return torch.randint(VOCABULARY, (sum(lengths),), generator=generator, dtype=torch.int32)
    return torch.randn(sum(lengths), FEATURES, generator=generator)
