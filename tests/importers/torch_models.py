"""Models of torch as their users write them, for tests of exporters and archives. Each answers with one tensor."""
# mypy: disable-error-code="no-any-return"
# A module of torch returns Any when it is called.

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.importers.importing import FEATURES, VOCABULARY, randomize

HIDDEN, LABELS = 5, 3
LENGTHS = (7, 4, 12, 5)
Norm = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Sample:
    """A model with random weights.

    build: makes the model; ids: whether it takes token ids; steps_first: whether its input is (steps, batch, ...); lengths: whether it
    takes the lengths of the sequences.
    """

    name: str
    build: Callable[[], nn.Module] = field(repr=False)
    ids: bool = False
    steps_first: bool = False
    lengths: bool = False

    def __str__(self) -> str:
        return self.name

    def module(self) -> nn.Module:
        return randomize(self.build())

    def inputs(self, lengths: Sequence[int] = (16, 16)) -> tuple[Tensor, ...]:
        """Return a batch of padded sequences, and their lengths where the model takes them."""
        generator = torch.Generator().manual_seed(3)
        shape = (len(lengths), max(lengths)) if self.ids else (len(lengths), max(lengths), FEATURES)
        x = torch.randint(0, VOCABULARY, shape, generator=generator) if self.ids else torch.randn(shape, generator=generator)
        x = x.transpose(0, 1).contiguous() if self.steps_first else x
        return (x, torch.tensor(lengths)) if self.lengths else (x,)

    def rows(self) -> list[Tensor]:
        """Return sequences of several lengths."""
        rows = [self.inputs([length])[0] for length in LENGTHS]
        return [row[:, 0] if self.steps_first else row[0] for row in rows]

    @torch.no_grad()
    def answers(self, module: nn.Module) -> list[Tensor]:
        """Return the answer for each row by itself."""
        batches = [self.inputs([length]) for length in LENGTHS]
        return [module(*batch) for batch in batches]


class Recurrent(nn.Module):
    """A recurrent layer, and a linear layer over the part of its result that `reads` names."""

    def __init__(self, kind: str, reads: str = "state", *, packed: bool = False, start: str = "", **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(FEATURES, HIDDEN, **options)
        self.reads, self.packed, self.start = reads, packed, start
        self.axis = 1 if self.rnn.batch_first else 0
        self.fc = nn.Linear((self.rnn.proj_size or HIDDEN) * (1 + self.rnn.bidirectional), LABELS)
        if start == "learned":
            self.hidden = nn.Parameter(torch.zeros(self.rnn.num_layers * (1 + self.rnn.bidirectional), 1, HIDDEN))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        given = None
        if self.start:
            levels, batch = self.rnn.num_layers * (1 + self.rnn.bidirectional), x.shape[1 - self.axis]
            learned = self.start == "learned"
            hidden = self.hidden.expand(-1, batch, -1).contiguous() if learned else torch.zeros(levels, batch, HIDDEN)
            given = (hidden, hidden.tanh()) if isinstance(self.rnn, nn.LSTM) else hidden
        if self.packed:
            x = pack_padded_sequence(x, lengths, batch_first=self.rnn.batch_first, enforce_sorted=False)  # type: ignore[arg-type, assignment]
        steps, state = self.rnn(x, given)
        if self.packed:
            steps, _ = pad_packed_sequence(steps, batch_first=self.rnn.batch_first)
        return self._head(steps, state[0] if isinstance(state, tuple) else state)

    def _head(self, steps: Tensor, hidden: Tensor) -> Tensor:
        if self.reads == "steps":
            return steps
        if self.reads == "tags":
            return self.fc(steps).softmax(-1)
        if self.reads == "max":
            return self.fc(steps.max(self.axis).values).sigmoid()
        if self.reads == "mean":
            return self.fc(steps.mean(self.axis)).log_softmax(-1)
        if self.reads == "last":
            return self.fc(steps[:, -1] if self.axis == 1 else steps[-1])
        both = torch.cat((hidden[-2], hidden[-1]), 1) if self.rnn.bidirectional else hidden[-1]
        return self.fc(both).softmax(1)


class TextCNN(nn.Module):
    """Kim's text CNN. conv: of one dimension or two; pool: how the maximum over time is written; hidden: with a layer before the last."""

    def __init__(self, conv: int = 1, pool: str = "max", padding: int = 0, *, hidden: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.conv, self.pool = conv, pool
        self.convs: Any = nn.ModuleList(
            nn.Conv1d(4, 5, width, padding=padding) if conv == 1 else nn.Conv2d(1, 5, (width, 4), padding=(padding, 0))
            for width in (2, 3, 1)
        )
        self.dropout = nn.Dropout(0.5)
        self.hidden = nn.Linear(15, 6) if hidden else None
        self.fc = nn.Linear(6 if hidden else 15, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x.transpose(1, 2) if self.conv == 1 else x.unsqueeze(1)
        maps = [functional.relu(conv(x)) if self.conv == 1 else functional.relu(conv(x)).squeeze(3) for conv in self.convs]
        if self.pool == "adaptive":
            pooled = [functional.adaptive_max_pool1d(each, 1).squeeze(-1) for each in maps]
        else:
            pooled = [each.max(2)[0] if self.pool == "max" else each.amax(2) for each in maps]
        y = self.dropout(torch.cat(pooled, 1))
        return functional.log_softmax(self.fc(y if self.hidden is None else torch.relu(self.hidden(y))), dim=1)


class Block(nn.Module):
    """A level of locuslab/TCN: padding on both sides, and a cut of the right side. Its convolutions have two names."""

    def __init__(self, inputs: int, dilation: int, norm: Norm, width: int) -> None:
        super().__init__()
        self.cut = (width - 1) * dilation
        self.conv1 = norm(nn.Conv1d(inputs, HIDDEN, width, padding=self.cut, dilation=dilation))
        self.conv2 = norm(nn.Conv1d(HIDDEN, HIDDEN, width, padding=self.cut, dilation=dilation))
        self.net = nn.Sequential(self.conv1, nn.ReLU(), self.conv2, nn.ReLU())
        self.downsample = nn.Conv1d(inputs, HIDDEN, 1) if inputs != HIDDEN else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv1(x)[:, :, : -self.cut].contiguous())
        y = torch.relu(self.conv2(y)[:, :, : -self.cut].contiguous())
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    def __init__(self, norm: Norm, reads: str = "last", *, width: int = 3, inputs: int = FEATURES, levels: int = 3) -> None:
        super().__init__()
        widths = [inputs, *[HIDDEN] * levels]
        self.network = nn.Sequential(*(Block(widths[level], 2**level, norm, width) for level in range(levels)))
        self.linear = nn.Linear(HIDDEN, LABELS)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.network(x.transpose(1, 2))
        return self.linear(y[:, :, -1]) if self.reads == "last" else self.linear(y.transpose(1, 2)).softmax(-1)


class Mixed(nn.Module):
    """Convolution, norms, pools and a recurrent layer in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, 6, 3, stride=2, padding=1, groups=3)
        self.batch_norm = nn.BatchNorm1d(6)
        self.pool = nn.MaxPool1d(2)
        self.rnn = nn.GRU(6, HIDDEN, batch_first=True, bidirectional=True)
        self.layer_norm = nn.LayerNorm(2 * HIDDEN)
        self.fc = nn.Linear(2 * HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(functional.gelu(self.batch_norm(self.conv(x.transpose(1, 2))))).transpose(1, 2)
        return torch.sigmoid(self.fc(self.layer_norm(self.rnn(y)[0]).mean(1)))


class Activated(nn.Module):
    """Token ids, the mean over time, and a head with a hidden layer and an activation."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).mean(1))


class Attention(nn.Module):
    """An attention pool over a recurrent layer."""

    def __init__(self, form: str = "sum", *, hidden: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.rnn = nn.GRU(4, HIDDEN, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(2 * HIDDEN, 6) if hidden else None
        self.query = nn.Linear(6 if hidden else 2 * HIDDEN, 1, bias=False)
        self.fc = nn.Linear(2 * HIDDEN, LABELS)
        self.form = form

    def forward(self, ids: Tensor) -> Tensor:
        steps, _ = self.rnn(self.embedding(ids))
        inner = steps if self.hidden is None else torch.tanh(self.hidden(steps))
        weights = torch.softmax(self.query(inner), 1)
        if self.form == "sum":
            return self.fc((weights * steps).sum(1))
        return self.fc(torch.bmm(weights.transpose(1, 2), steps).squeeze(1))


class Gated(nn.Module):
    """A causal convolution with a gated linear unit, as functional.glu writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, 8, 3)
        self.fc = nn.Linear(4, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.glu(self.conv(functional.pad(x.transpose(1, 2), (2, 0))), 1)
        return self.fc(y.transpose(1, 2).mean(1))


def plain(module: nn.Module) -> nn.Module:
    return module


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def _recurrent(kind: str, option: str, *args: Any, batch_first: bool = True, **options: Any) -> Sample:
    name = f"nn.{kind}: {option}{', bidirectional' * options.get('bidirectional', False)}{', batch_first=False' * (not batch_first)}"
    build = partial(Recurrent, kind, *args, batch_first=batch_first, **options)
    return Sample(name, build, steps_first=not batch_first, lengths=options.get("packed", False))


def _recurrent_samples() -> Iterator[Sample]:
    for kind, both in product(("LSTM", "GRU", "RNN"), (False, True)):
        yield _recurrent(kind, "final state", bidirectional=both)
        yield _recurrent(kind, "two layers", "max", bidirectional=both, num_layers=2)
        yield _recurrent(kind, "without bias", "mean", bidirectional=both, bias=False)
        yield _recurrent(kind, "every step", "steps", bidirectional=both, batch_first=False)
    for kind in ("LSTM", "GRU", "RNN"):
        yield _recurrent(kind, "last step", "last")
        yield _recurrent(kind, "last step", "last", batch_first=False)
        yield _recurrent(kind, "tags", "tags", bidirectional=True)
        yield _recurrent(kind, "initial states of zeros", start="zeros", num_layers=2)
        yield _recurrent(kind, "learned initial states", start="learned", bidirectional=True)
    yield _recurrent("RNN", 'nonlinearity="relu"', "last", nonlinearity="relu")


def _packed_samples() -> Iterator[Sample]:
    for kind, first in product(("LSTM", "GRU", "RNN"), (True, False)):
        yield _recurrent(kind, "packed", "steps", packed=True, batch_first=first)
        yield _recurrent(kind, "packed, two layers", packed=True, batch_first=first, num_layers=2, bidirectional=True)


RECURRENT = list(_recurrent_samples())
PACKED = list(_packed_samples())
PROJECTED = [_recurrent("LSTM", "proj_size=2", bidirectional=both, proj_size=2) for both in (False, True)]
OTHERS = [
    *(
        Sample(f"nn.Conv{conv}d: text CNN{option}", partial(TextCNN, conv, pool, padding), ids=True)
        for conv, option, pool, padding in (
            *((1, "", "max", 0), (1, " with padding", "max", 2), (1, ", adaptive_max_pool1d", "adaptive", 0)),
            *((2, "", "max", 0), (2, ", amax", "amax", 0)),
        )
    ),
    Sample("nn.Conv1d: TCN", lambda: TCN(plain)),
    Sample("nn.Conv1d: TCN with nn.utils.weight_norm", lambda: TCN(old_weight_norm)),
    Sample("nn.Conv1d: TCN with parametrizations.weight_norm", lambda: TCN(parametrizations.weight_norm, "tags")),
    Sample("nn.Conv1d: causal, functional.glu", Gated),
    Sample("nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.GRU, nn.LayerNorm: stride and groups", Mixed),
    Sample("nn.GRU: attention pool by sum", Attention, ids=True),
    Sample("nn.GRU: attention pool by bmm", partial(Attention, "bmm"), ids=True),
    Sample("nn.GRU: attention pool by bmm, linear", partial(Attention, "bmm", hidden=False), ids=True),
]


def _activated(activation: nn.Module) -> Sample:
    return Sample(f"nn.Embedding, nn.Linear: {activation}", partial(Activated, activation), ids=True)


ACTIVATED = [
    *map(_activated, (nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Hardsigmoid(), nn.ELU(0.5), nn.SELU(), nn.LeakyReLU(0.2))),
    *map(_activated, (nn.Softplus(), nn.Hardtanh(), nn.Softsign(), nn.CELU(), nn.Tanh(), nn.Sigmoid(), nn.ReLU6())),
    _activated(nn.Threshold(0.0, 0.0)),
]
REFUSED = [*map(_activated, (nn.Hardswish(), nn.Mish(), nn.Tanhshrink(), nn.LogSigmoid()))]


def named(*names: str) -> list[Sample]:
    """Return the samples with these names, or with these options."""
    every = (*RECURRENT, *PACKED, *PROJECTED, *OTHERS, *ACTIVATED)
    found = [sample for sample in every if sample.name in names or sample.name.rpartition(": ")[2] in names]
    assert len(found) == len(names), names
    return found
