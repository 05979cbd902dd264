"""Runs two versions of a model on the same inputs, and compares their answers and their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ragged import Ragged
from service.compress.inputs import Inputs
from service.modeling.encoder import Encoder, Encoding

BATCH_SEQUENCES = 32
TIMED, ROUNDS = 64, 5
"""Number of inputs that are timed one by one, and runs of each."""


class Answer(NamedTuple):
    """The answer for one input. values: probabilities, scores, or the numbers that the head returns; best: the chosen labels, positions
    or token, empty for a head that chooses nothing."""

    values: Tensor
    best: list[int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two versions differ. precisions, accuracies: before and after; accuracies is None without labels.

    origin: the inputs; same_best: the share of them with the same best answer, or None for a head that chooses nothing; times: the median
    seconds of one input before and after, by the name of the device.
    """

    origin: str
    precisions: tuple[str, str]
    same_best: float | None
    largest: float
    mean: float
    accuracies: tuple[float, float] | None
    times: Mapping[str, tuple[float, float]]


def compare(encoders: Sequence[Encoder], inputs: Inputs, times: Mapping[str, tuple[float, float]]) -> Comparison:
    """Return how the answers of two versions of a model differ. times: as in `Comparison`."""
    first, second = (_answers(encoder, inputs.sequences) for encoder in encoders)
    before, after = encoders
    differences = torch.cat([(one.values - other.values).abs().flatten() for one, other in zip(first, second, strict=True)])
    same = sum(one.best == other.best for one, other in zip(first, second, strict=True))
    return Comparison(
        origin=inputs.origin,
        precisions=(before.spec.precision, after.spec.precision),
        same_best=same / len(first) if first[0].best else None,
        largest=differences.max().item(),
        mean=differences.double().mean().item(),
        accuracies=None if inputs.labels is None else (_accuracy(first, inputs.labels), _accuracy(second, inputs.labels)),
        times=times,
    )


def median_seconds(encoders: Sequence[Encoder], sequences: Sequence[Tensor]) -> tuple[float, float]:
    """Return the median time of one input in each version. The versions take turns, so that a change of the machine affects both."""
    times: tuple[list[float], list[float]] = ([], [])
    for sequence in sequences[:TIMED]:
        for _ in range(ROUNDS):
            for encoder, seconds in zip(encoders, times, strict=True):
                seconds.append(_seconds(encoder, sequence))
    first, second = map(statistics.median, times)
    return first, second


def _seconds(encoder: Encoder, sequence: Tensor) -> float:
    offsets = torch.tensor([0, len(sequence)], dtype=torch.int32, device=encoder.device)
    x = Ragged(sequence.to(encoder.device), offsets)
    if encoder.device.type == "cuda":
        torch.cuda.synchronize(encoder.device)
    start = time.perf_counter()
    encoder(x)
    if encoder.device.type == "cuda":
        torch.cuda.synchronize(encoder.device)
    return time.perf_counter() - start


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
