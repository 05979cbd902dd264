"""Distillation: a small model learns the probabilities of a large one (Hinton, Vinyals and Dean, 2015)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from training.classifier import Classifier
from training.vocabulary import PaddedBatch


@dataclass(frozen=True)
class Distillation:
    """A loss of a student with the same tokens and labels as its teacher, which is in its evaluation mode.

    temperature: divides the scores of both before the softmax, so that labels with low scores count; share: of the soft labels in the
    loss; the hard labels have the rest. The teacher reads the same batch as the student, with the same unknown words.
    """

    teacher: Classifier
    temperature: float
    share: float

    def __call__(self, student: Classifier, batch: PaddedBatch, smoothing: float) -> Tensor:
        with torch.no_grad():
            expected = self.teacher(batch.tokens, batch.lengths)
        scores = student(batch.tokens, batch.lengths)
        hard = cross_entropy(scores, batch.labels, label_smoothing=smoothing)
        return self.share * soft_loss(scores, expected, self.temperature) + (1 - self.share) * hard


def soft_loss(scores: Tensor, expected: Tensor, temperature: float) -> Tensor:
    """Return the mean divergence of (rows, labels) scores from a teacher's scores. The square of the temperature keeps the size of the
    gradient."""
    student, teacher = ((values / temperature).log_softmax(1) for values in (scores, expected))
    return temperature**2 * kl_div(student, teacher, reduction="batchmean", log_target=True)
