"""Heads on a device, as their descriptors say: from the encoder's outputs to the output of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs, compute_dtype
from service.modeling.activations import kernel_activation
from service.modeling.pooled_vector import PooledVector
from service.modeling.spec.heads import Head
from service.modeling.spec.heads.descriptor import PoolingHead
from service.modeling.state_slabs import RowSlots


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


class RunnableHead:
    """A head on a device: a vector of each row or step, a linear layer, a function of its scores and a choice among them.

    wants: the outputs that the encoder has to compute. linear: weight and bias of a linear layer over one vector per row; the layer below
    may apply it and fill Encoded.scores. streams: whether the head can answer for the steps so far, and later for further steps.
    """

    def __init__(self, head: Head, arrays: Mapping[str, Tensor], device: torch.device) -> None:
        """arrays: of the whole model."""
        self._head = head
        self._vector = PooledVector(head, arrays, device) if isinstance(head, PoolingHead) else None
        self._weights = [
            arrays[name].to(device, compute_dtype(arrays[name].dtype, device))
            for name in ("head.weight", "head.bias")
            if name in arrays
        ]
        self._function = _score_function(head)
        self._choose = None if head.choice is None else _CHOICES[head.choice]
        self._per_step = head.answers_steps
        self.wants = self._vector.wants if self._vector else Outputs(last=bool(head.pools), steps=not head.pools)
        self.streams = head.choice != "span" and (self._vector is None or self._vector.streams)
        self._states: dict[str, Tensor] = {}
        self.linear: tuple[Tensor, Tensor] | None = None
        if self._weights and self._vector and self._vector.is_pool_alone:
            self.linear = self._weights[0], self._weights[1]

    def allocate_states(self, slots: int, inputs: int, device: torch.device) -> dict[str, Tensor]:
        """Allocate the states of `slots` sequences, and return them by name, (slots, width). inputs: the width of the last layer."""
        self._states = {
            name: torch.full((slots, state.width), state.initial, device=device)
            for name, state in self._head.states(inputs).items()
        }
        return self._states

    def __call__(self, encoded: Encoded, offsets: Tensor, slots: RowSlots | None = None) -> HeadOutput:
        """Run the head. offsets: (rows + 1,) where the steps of each row begin. slots: of the states that the rows continue from."""
        if self._vector is not None:
            if slots is not None and self._states:
                encoded = self._vector.extended(encoded, offsets, slots, self._states)
            vector: Tensor | None = self._vector(encoded, offsets)
        else:
            vector = encoded.last if self.wants.last else None
        if not self._weights:
            return HeadOutput(embedding=vector if vector is None else self.scores(vector))
        scores = encoded.scores
        if scores is None:
            x = encoded.steps if vector is None else vector
            assert x is not None, "the head wants these vectors"
            scores = self._linear(x)
        return self.answers(scores, offsets, vector)

    def answers(self, logits: Tensor, offsets: Tensor, embedding: Tensor | None = None) -> HeadOutput:
        """Return the answers for the scores of the linear layer, (lines, n)."""
        scores, picks = self.scores(logits), None
        if self._choose is not None:
            scores, picks = self._choose(self._head, scores, offsets)
        return HeadOutput(scores, picks, embedding, self._per_step)

    @property
    def newest_alone(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of the linear layer if it multiplies the newest step alone, else None."""
        pools = self._vector is not None and (not self._vector.is_pool_alone or self.wants.mean or self.wants.max)
        return None if pools or not self.streams or not self._weights else (self._weights[0], self._weights[1])

    def logits(self, vectors: Tensor) -> Tensor | None:
        """Return the scores of the head's linear layer, (lines, n) float32, or None without one. vectors: (lines, width)."""
        return self._linear(vectors).float() if self._weights else None

    def scores(self, logits: Tensor) -> Tensor:
        """Return the main output of the head, (lines, n), for the scores of its linear layer, or for its vectors without one."""
        return logits if self._function is None else self._function(logits)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the head holds on the device."""
        return [*self._weights, *(self._vector.tensors() if self._vector else ())]

    def _linear(self, x: Tensor) -> Tensor:
        """Return ``x @ weight + bias`` in the device's arithmetic dtype."""
        weight, bias = self._weights
        return torch.addmm(bias, x if x.dtype == weight.dtype else x.to(weight.dtype), weight)


def _score_function(head: Head) -> Callable[[Tensor], Tensor] | None:
    """Return the function of the scores, or of the vectors of a head without a linear layer."""
    match head.score_function:
        case "softmax":
            return lambda scores: scores.softmax(dim=1, dtype=torch.float32)
        case "sigmoid":
            return lambda scores: scores.float().sigmoid()
        case "unit_length":
            return lambda vectors: torch.nn.functional.normalize(vectors, dim=1)
        case None:
            return None
    activation = kernel_activation(head.score_function)
    return lambda scores: activation(scores.float())


def _best(head: Any, scores: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    best, picks = scores.max(dim=1, keepdim=True)
    return best, picks.int()


def _top(head: Any, scores: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    best, picks = scores.topk(head.top, dim=1)
    return best, picks.int()


def _spans(head: Any, scores: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    logits = scores.float()
    best, picks = zip(*(_best_span(logits[begin:end]) for begin, end in pairwise(offsets.tolist())), strict=True)
    return torch.stack(best)[:, None], torch.stack(picks)


_CHOICES: dict[str, Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]] = {"best": _best, "top": _top, "span": _spans}
"""Return the scores and the picks of each choice of a descriptor."""


def _best_span(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of the best span and its (2,) start and end. logits: (steps, 2)."""
    start, end = logits.log_softmax(dim=0).unbind(dim=1)
    best_end, at = end.flip(0).cummax(dim=0)  # for each step, the best end at or after it
    total = start + best_end.flip(0)
    first = total.argmax()
    last = len(end) - 1 - at.flip(0)[first]
    return total[first].exp(), torch.stack((first, last)).int()
