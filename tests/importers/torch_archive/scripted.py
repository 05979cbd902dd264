"""Modules that torch.jit.script compiles: with branches, loops over modules, optional inputs and packed sequences."""
# mypy: disable-error-code="no-any-return"

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.importers.importing import FEATURES
from tests.importers.torch_models import HIDDEN, LABELS, Sample, named


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


class EverySecond(nn.Module):
    """Leaves out every second step."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, ::2])


class TwoSteps(nn.Module):
    """Pools each half of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.adaptive_max_pool1d(self.conv(x.transpose(1, 2)), 2)


SCRIPTED = [
    *named("nn.Conv1d: text CNN, adaptive_max_pool1d", "stride and groups", "attention pool by sum"),
    Sample("packed sequences", Packing, lengths=True),
    Sample("an optional state, inplace=True, LayerNorm of the last step", Optionals, steps_first=True),
]
REFUSED = Sample("a branch by numbers of the input", OfNumbers)
