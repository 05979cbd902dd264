"""Modules that torch.jit.script compiles: with branches, loops over modules, optional inputs and packed sequences."""
# mypy: disable-error-code="no-any-return"

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.importers.torch_models import FEATURES, HIDDEN, LABELS, VOCABULARY, Sample


class Layered(nn.Module):
    """A convolution, a bidirectional LSTM of two layers, dropout, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4, padding_idx=0)
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.rnn = nn.LSTM(6, HIDDEN, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.norm = nn.BatchNorm1d(2 * HIDDEN)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(2 * HIDDEN, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.relu(self.conv(self.embedding(ids).transpose(1, 2))).transpose(1, 2)
        steps, _ = self.rnn(x)
        return torch.softmax(self.fc(self.dropout(self.norm(steps.mean(1)))), 1)


class Branches(nn.Module):
    """A text CNN that loops over its convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.convs = nn.ModuleList([nn.Conv1d(4, 5, width) for width in (2, 3, 4)])
        self.fc = nn.Linear(15, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(1, 2)
        pooled = []
        for conv in self.convs:
            y = functional.relu(conv(x))
            pooled.append(functional.max_pool1d(y, y.shape[2]).squeeze(2))
        return functional.log_softmax(self.fc(torch.cat(pooled, 1)), dim=1)


class Packing(nn.Module):
    """A GRU over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(FEATURES, HIDDEN, batch_first=True)
        self.fc = nn.Linear(HIDDEN, LABELS)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        steps, _ = self.rnn(packed)
        padded, _ = pad_packed_sequence(steps, batch_first=True)
        return self.fc(padded)


class Optionals(nn.Module):
    """An RNN with an optional initial state, and operators that change tensors in place."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(FEATURES, HIDDEN, nonlinearity="relu")
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Sequential(nn.Linear(HIDDEN, 6), nn.ReLU(inplace=True), nn.Linear(6, LABELS), nn.Sigmoid())

    def forward(self, x: Tensor, state: Optional[Tensor] = None) -> Tensor:  # noqa: UP045  # the compiler needs this form
        steps, _ = self.rnn(x, state)
        return self.head(self.norm(steps[-1]))


class WithState(nn.Module):
    """A module with code that reads its state. torch.jit.load runs this code."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, bool]:
        return self.factor, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, bool]) -> None:
        self.factor = state[0]
        self.training = state[1]


class OfNumbers(nn.Module):
    """Branches by the numbers of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if bool(y[0, 0, 0] > 0):
            return y
        return -y


SCRIPTED = [
    Sample("torch.jit.script: embedding, convolution, nn.LSTM, dropout, batch norm", Layered, ids=True),
    Sample("torch.jit.script: a loop over convolutions", Branches, ids=True),
    Sample("torch.jit.script: packed sequences", Packing, lengths=True),
    Sample("torch.jit.script: an optional state, inplace=True, LayerNorm of the last step", Optionals, steps_first=True),
]
REFUSED = Sample("torch.jit.script: a branch by numbers of the input", OfNumbers)
