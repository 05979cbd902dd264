"""Runs two versions of a model on the same inputs and compares their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ragged import Ragged
from service.modeling.encoder import Encoder, Encoding
from service.quantize.inputs import Inputs

BATCH_SEQUENCES = 32


class Answer(NamedTuple):
    """The answer for one input. values: probabilities, scores, or the numbers that the head returns; best: the chosen labels, positions
    or token, empty for a head that chooses nothing."""

    values: Tensor
    best: list[int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the answers of two versions differ. precisions, accuracies: before and after; accuracies is None without labels.

    same_best: the share of inputs with the same best answer, or None for a head that chooses nothing.
    """

    origin: str
    precisions: tuple[str, str]
    same_best: float | None
    largest: float
    mean: float
    accuracies: tuple[float, float] | None


def compare(before: Encoder, after: Encoder, inputs: Inputs) -> Comparison:
    """Return how the answers of two versions of a model to the same inputs differ."""
    first, second = (_answers(encoder, inputs.sequences) for encoder in (before, after))
    differences = torch.cat([(one.values - other.values).abs().flatten() for one, other in zip(first, second, strict=True)])
    same = sum(one.best == other.best for one, other in zip(first, second, strict=True))
    labels = inputs.labels
    return Comparison(
        origin=inputs.origin,
        precisions=(before.spec.precision, after.spec.precision),
        same_best=same / len(first) if first[0].best else None,
        largest=differences.max().item(),
        mean=differences.double().mean().item(),
        accuracies=None if labels is None else (_accuracy(first, labels), _accuracy(second, labels)),
    )


def _accuracy(answers: Sequence[Answer], labels: Sequence[int]) -> float:
    """Return the share of answers whose best label is correct."""
    return sum(answer.best == [label] for answer, label in zip(answers, labels, strict=True)) / len(labels)


def _answers(encoder: Encoder, sequences: Sequence[Tensor]) -> list[Answer]:
    answers: list[Answer] = []
    for begin in range(0, len(sequences), BATCH_SEQUENCES):
        batch = list(sequences[begin : begin + BATCH_SEQUENCES])
        offsets = torch.tensor([0, *map(len, batch)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        encoding = encoder(Ragged(torch.cat(batch), offsets), sequence=encoder.spec.head.kind == "sequence")
        answers += _by_input(encoding, encoder.spec.head.kind)
    return answers


def _by_input(encoding: Encoding, head: str) -> list[Answer]:
    """Return the answer for each input of a batch."""
    output, rows = encoding.head_output, len(encoding.offsets) - 1
    values = next(tensor for tensor in (encoding.sequence, output.scores, output.embedding) if tensor is not None)
    best = _best(encoding, head)
    lines = encoding.offsets.diff().tolist() if output.per_step or encoding.sequence is not None else [1] * rows
    chosen = [[] for _ in lines] if best is None else [part.flatten().tolist() for part in torch.split(best, lines)]
    return [Answer(part, numbers) for part, numbers in zip(torch.split(values, lines), chosen, strict=True)]


def _best(encoding: Encoding, head: str) -> Tensor | None:
    output = encoding.head_output
    if head == "classify":
        assert output.scores is not None
        return output.scores.argmax(dim=1)
    if head == "next":
        assert output.picks is not None
        return output.picks[:, 0]
    return output.picks
