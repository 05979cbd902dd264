"""Heads: from what the encoder gives to what the caller asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, arithmetic
from service.modeling.spec import ClassifyHead, EmbedHead, Head, NextHead, RegressHead, SequenceHead, SpanHead, TagHead


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a head says of a batch, one line a row, or one a step when `per_step`.

    scores: (lines, n) float32; picks: (lines, m) int32, the labels, positions or tokens that were chosen; embedding: (rows, width) the
    vector under the head. None is what a head has not.
    """

    scores: Tensor | None = None
    picks: Tensor | None = None
    embedding: Tensor | None = None
    per_step: bool = False


class Judge(ABC):
    """One head on a device."""

    wants: Outputs
    """What the encoder has to give."""
    linear: tuple[Tensor, Tensor] | None = None
    """Weight and bias of a linear layer over one vector a row, which the layer below may see to: Encoded.scores."""
    streams = True
    """Whether it can say something of the steps so far, and of further ones by themselves."""

    @abstractmethod
    def __call__(self, encoded: Encoded, offsets: Tensor) -> Verdict:
        """offsets: (rows + 1,) where each row's steps begin."""

    def tensors(self) -> list[Tensor]:
        """What it holds on the device."""
        return []


class Linear:
    """``x @ weight + bias`` in the arithmetic of the device; out as it comes, since what follows reads it in float32."""

    def __init__(self, arrays: Mapping[str, Tensor], device: torch.device) -> None:
        self.weight, self.bias = (
            arrays[name].to(device, arithmetic(arrays[name].dtype, device)) for name in ("head.weight", "head.bias")
        )

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.to(self.weight.dtype), self.weight)


class OverLinear(Judge):
    """A head with a linear layer."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def tensors(self) -> list[Tensor]:
        return [self._linear.weight, self._linear.bias]


class Pooled(OverLinear):
    """A linear layer over one vector a row: classify by softmax, regress as it is."""

    def __init__(self, head: ClassifyHead | RegressHead, linear: Linear) -> None:
        super().__init__(linear)
        self.wants = Outputs(**{head.pool: True})
        self.linear = linear.weight, linear.bias
        self._pool = head.pool
        self._softmax = isinstance(head, ClassifyHead)

    def __call__(self, encoded: Encoded, offsets: Tensor) -> Verdict:
        pooled: Tensor = getattr(encoded, self._pool)
        scores = self._linear(pooled) if encoded.scores is None else encoded.scores
        return Verdict(_softmax(scores) if self._softmax else scores.float(), embedding=pooled)


class Tag(OverLinear):
    """The likeliest label of every step and its probability."""

    wants = Outputs(steps=True)

    def __call__(self, encoded: Encoded, offsets: Tensor) -> Verdict:
        assert encoded.steps is not None
        scores, picks = _softmax(self._linear(encoded.steps)).max(dim=1, keepdim=True)
        return Verdict(scores, picks.int(), per_step=True)


class Span(OverLinear):
    """The likeliest start and end, the end not before the start, and the product of their probabilities."""

    wants = Outputs(steps=True)
    streams = False

    def __call__(self, encoded: Encoded, offsets: Tensor) -> Verdict:
        assert encoded.steps is not None
        logits = self._linear(encoded.steps).float()
        best = [_best_span(logits[begin:end]) for begin, end in pairwise(offsets.tolist())]
        scores, picks = zip(*best, strict=True)
        return Verdict(torch.stack(scores)[:, None], torch.stack(picks))


class Next(OverLinear):
    """The likeliest next tokens and their probabilities, the likeliest first."""

    wants = Outputs(last=True)

    def __init__(self, head: NextHead, linear: Linear) -> None:
        super().__init__(linear)
        self._top = head.top

    def __call__(self, encoded: Encoded, offsets: Tensor) -> Verdict:
        assert encoded.last is not None
        scores, picks = _softmax(self._linear(encoded.last)).topk(self._top, dim=1)
        return Verdict(scores, picks.int(), encoded.last)


class Embed(Judge):
    """The pooled vector."""

    def __init__(self, head: EmbedHead) -> None:
        self.wants = Outputs(**{head.pool: True})
        self._head = head

    def __call__(self, encoded: Encoded, offsets: Tensor) -> Verdict:
        pooled: Tensor = getattr(encoded, self._head.pool)
        return Verdict(embedding=torch.nn.functional.normalize(pooled, dim=1) if self._head.normalize else pooled)


class EveryStep(Judge):
    """Nothing of its own: the steps are the answer."""

    wants = Outputs(steps=True)

    def __call__(self, encoded: Encoded, offsets: Tensor) -> Verdict:
        return Verdict()


def build(head: Head, arrays: Mapping[str, Tensor], device: torch.device) -> Judge:
    """The head with its weights on `device`."""
    if isinstance(head, EmbedHead):
        return Embed(head)
    if isinstance(head, SequenceHead):
        return EveryStep()
    linear = Linear(arrays, device)
    if isinstance(head, TagHead):
        return Tag(linear)
    if isinstance(head, SpanHead):
        return Span(linear)
    if isinstance(head, NextHead):
        return Next(head, linear)
    assert isinstance(head, ClassifyHead | RegressHead)
    return Pooled(head, linear)


def _softmax(scores: Tensor) -> Tensor:
    """Of each line, in float32."""
    return scores.softmax(dim=1, dtype=torch.float32)


def _best_span(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: (steps, 2). The probability of the best span and (2,) its start and end."""
    start, end = logits.log_softmax(dim=0).unbind(dim=1)
    best_end, at = end.flip(0).cummax(dim=0)  # for each step, the best end that is not before it
    total = start + best_end.flip(0)
    first = total.argmax()
    last = len(end) - 1 - at.flip(0)[first]
    return total[first].exp(), torch.stack((first, last)).int()
