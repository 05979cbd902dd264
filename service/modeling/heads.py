"""Heads: from the encoder's outputs to the output of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs, compute_dtype
from service.modeling.activations import kernel_activation
from service.modeling.pooled_vector import PooledVector
from service.modeling.spec.heads import ClassifyHead, EmbedHead, Head, NextHead, RegressHead, SequenceHead, SpanHead, TagHead


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """The output of a head for a batch, one line per row, or per step if `per_step`. None for outputs that the head does not have.

    scores: (lines, n) float32; picks: (lines, m) int32, the chosen labels, positions or tokens; embedding: (rows, width), the vector that
    the head works on.
    """

    scores: Tensor | None = None
    picks: Tensor | None = None
    embedding: Tensor | None = None
    per_step: bool = False


class RunnableHead(ABC):
    """A head on a device."""

    wants: Outputs
    """The outputs that the encoder has to compute for this head."""
    linear: tuple[Tensor, Tensor] | None = None
    """Weight and bias of a linear layer over one vector per row. The layer below may apply it and fill Encoded.scores."""
    streams = True
    """Whether the head can answer for the steps so far, and later for further steps."""

    @abstractmethod
    def __call__(self, encoded: Encoded, offsets: Tensor) -> HeadOutput:
        """Run the head. offsets: (rows + 1,) where the steps of each row begin."""

    def logits(self, vectors: Tensor) -> Tensor | None:
        """Return the scores of the head's linear layer, (lines, n) float32, or None without one. vectors: (lines, width)."""
        return None

    def scores(self, logits: Tensor) -> Tensor:
        """Return the answers of the head for the scores of its linear layer."""
        return logits

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the head holds on the device."""
        return []


class Linear:
    """``x @ weight + bias`` in the device's arithmetic dtype."""

    def __init__(self, arrays: Mapping[str, Tensor], device: torch.device) -> None:
        self.weight, self.bias = (
            arrays[name].to(device, compute_dtype(arrays[name].dtype, device)) for name in ("head.weight", "head.bias")
        )

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.to(self.weight.dtype), self.weight)


class LinearHead(RunnableHead):
    """Base class of heads with a linear layer."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def logits(self, vectors: Tensor) -> Tensor:
        return self._linear(vectors).float()

    def tensors(self) -> list[Tensor]:
        return [self._linear.weight, self._linear.bias]


class PooledHead(LinearHead):
    """A linear layer over one vector per row, followed by a function of its scores."""

    def __init__(self, vector: PooledVector, linear: Linear, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(linear)
        self.wants = vector.wants
        self.streams = vector.streams
        if vector.is_pool_alone:
            self.linear = linear.weight, linear.bias
        self._vector = vector
        self._function = function

    def __call__(self, encoded: Encoded, offsets: Tensor) -> HeadOutput:
        vector = self._vector(encoded, offsets)
        scores = self._linear(vector) if encoded.scores is None else encoded.scores
        return HeadOutput(self._function(scores), embedding=vector)

    def scores(self, logits: Tensor) -> Tensor:
        return self._function(logits)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self._vector.tensors()]


class Tagger(LinearHead):
    """The most likely label of every step and its probability."""

    wants = Outputs(steps=True)

    def __call__(self, encoded: Encoded, offsets: Tensor) -> HeadOutput:
        assert encoded.steps is not None
        scores, picks = _softmax(self._linear(encoded.steps)).max(dim=1, keepdim=True)
        return HeadOutput(scores, picks.int(), per_step=True)


class SpanFinder(LinearHead):
    """The most likely start and end, with start <= end, and the product of their probabilities."""

    wants = Outputs(steps=True)
    streams = False

    def __call__(self, encoded: Encoded, offsets: Tensor) -> HeadOutput:
        assert encoded.steps is not None
        logits = self._linear(encoded.steps).float()
        best = [_best_span(logits[begin:end]) for begin, end in pairwise(offsets.tolist())]
        scores, picks = zip(*best, strict=True)
        return HeadOutput(torch.stack(scores)[:, None], torch.stack(picks))


class NextTokens(LinearHead):
    """The most likely next tokens and their probabilities, in descending order."""

    wants = Outputs(last=True)

    def __init__(self, head: NextHead, linear: Linear) -> None:
        super().__init__(linear)
        self._top = head.top

    def __call__(self, encoded: Encoded, offsets: Tensor) -> HeadOutput:
        assert encoded.last is not None
        scores, picks = _softmax(self._linear(encoded.last)).topk(self._top, dim=1)
        return HeadOutput(scores, picks.int(), encoded.last)


class VectorHead(RunnableHead):
    """The pooled vector itself."""

    def __init__(self, vector: PooledVector, *, normalize: bool) -> None:
        self.wants = vector.wants
        self.streams = vector.streams
        self._vector = vector
        self._normalize = normalize

    def __call__(self, encoded: Encoded, offsets: Tensor) -> HeadOutput:
        vector = self._vector(encoded, offsets)
        return HeadOutput(embedding=torch.nn.functional.normalize(vector, dim=1) if self._normalize else vector)

    def tensors(self) -> list[Tensor]:
        return self._vector.tensors()


class EveryStep(RunnableHead):
    """Adds no output: the answer is the encoder's steps."""

    wants = Outputs(steps=True)

    def __call__(self, encoded: Encoded, offsets: Tensor) -> HeadOutput:
        return HeadOutput()


def build(head: Head, arrays: Mapping[str, Tensor], device: torch.device) -> RunnableHead:
    """Return the head with its weights on `device`."""
    if isinstance(head, EmbedHead):
        return VectorHead(PooledVector(head, arrays, device), normalize=head.normalize)
    if isinstance(head, SequenceHead):
        return EveryStep()
    linear = Linear(arrays, device)
    if isinstance(head, TagHead):
        return Tagger(linear)
    if isinstance(head, SpanHead):
        return SpanFinder(linear)
    if isinstance(head, NextHead):
        return NextTokens(head, linear)
    assert isinstance(head, ClassifyHead | RegressHead)
    return PooledHead(PooledVector(head, arrays, device), linear, _score_function(head))


def _score_function(head: ClassifyHead | RegressHead) -> Callable[[Tensor], Tensor]:
    """Return the function from the scores of the linear layer to the answers of the head, float32."""
    if isinstance(head, ClassifyHead):
        return _probabilities if head.multi_label else _softmax
    activation = kernel_activation(head.activation)
    return lambda scores: activation(scores.float())


def _probabilities(scores: Tensor) -> Tensor:
    """Return the probability of each label by itself."""
    return scores.float().sigmoid()


def _softmax(scores: Tensor) -> Tensor:
    """Return the softmax of each line in float32."""
    return scores.softmax(dim=1, dtype=torch.float32)


def _best_span(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of the best span and its (2,) start and end. logits: (steps, 2)."""
    start, end = logits.log_softmax(dim=0).unbind(dim=1)
    best_end, at = end.flip(0).cummax(dim=0)  # for each step, the best end at or after it
    total = start + best_end.flip(0)
    first = total.argmax()
    last = len(end) - 1 - at.flip(0)[first]
    return total[first].exp(), torch.stack((first, last)).int()
