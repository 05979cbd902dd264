"""Train a classifier of whole time series with one or more channels, and write it as a model folder with a card.

The data is any set in the format of `training/series_sets.py`; series may differ in length. The test part is read once, at the end.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from training import series_sets
from training.batches import Batch, Row, batches
from training.encoders import STEP_ENCODERS
from training.fitting import fit
from training.model import Model, Scaled
from training.parts import Parts, in_order
from training.recipe import Recipe, Trained, main
from training.series_sets import Series
from training.service import Advance, Service, ignore

from service.modeling.spec import SequenceInput
from service.modeling.spec.heads import ClassifyHead


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. `noise` is in standard deviations of a channel."""

    encoder: str
    hidden: int = 64
    epochs: int = 40
    batch: int = 16
    rate: float = 0.004
    dropout: float = 0.3
    noise: float = 0.2
    smoothing: float = 0.1
    seed: int = 1


class SeriesRecipe(Recipe):
    """An answer is a label."""

    task, default_set = "series", "JapaneseVowels"
    settings: ClassVar = {encoder: Settings(encoder) for encoder in STEP_ENCODERS}
    quick: ClassVar = {"hidden": 8, "epochs": 2}

    def read(self, data: Path, name: str, settings: Settings) -> Parts:
        return Parts(series_sets.read(data, name, "TRAIN"), [], self.read_test(data, name))

    def read_test(self, data: Path, name: str) -> list[Series]:
        return series_sets.read(data, name, "TEST")

    def train(self, name: str, parts: Parts, settings: Settings, device: torch.device) -> Trained:
        labels, channels = in_order({series.label for series in parts.train}), parts.train[0].rows.shape[1]
        inputs = Scaled(torch.from_numpy(np.concatenate([series.rows for series in parts.train])))
        encoder = STEP_ENCODERS[settings.encoder](channels, settings.hidden, False)
        model = Model(inputs, encoder, len(labels), pooled=True, dropout=settings.dropout).to(device)
        rows = [Row(torch.from_numpy(each.rows), torch.tensor([labels.index(each.label)])) for each in parts.train]
        deviations = settings.noise * inputs.norm[3].sqrt().cpu()

        def shuffled(epoch: int) -> list[Batch]:
            return list(batches([rows[index] for index in torch.randperm(len(rows)).tolist()], settings.batch))

        def backward(batch: Batch) -> Tensor:
            noise = deviations * torch.randn(batch.inputs.shape)
            scores = model((batch.inputs + noise).to(device), batch.lengths.to(device))
            targets = batch.targets[:, 0].to(device)
            loss = nn.functional.cross_entropy(scores, targets, label_smoothing=settings.smoothing)
            torch.autograd.backward(loss)
            return loss.detach()

        fitted = fit(model, settings.epochs, settings.rate, shuffled, backward)
        max_steps = 2 * max(len(series.rows) for series in parts.train)
        description = f"The label of a time series of {channels} channels of the set {name}"
        head = ClassifyHead(kind="classify", pool=("max",), labels=labels)
        return Trained(model, fitted, description, SequenceInput(kind="features", features=channels, max_steps=max_steps), head)

    def answers(self, trained: Trained, examples: list[Series]) -> list[str]:
        assert isinstance(trained.head, ClassifyHead)
        scores = trained.model.scores([torch.from_numpy(series.rows) for series in examples])
        return [trained.head.labels[int(row.argmax())] for row in scores]

    def ask(self, service: Service, model: str, examples: list[Series], advance: Advance = ignore) -> list[str]:
        outputs = service.outputs(model, [series.rows.tolist() for series in examples], advance)
        return [output["label"] for output in outputs]

    def quality(self, examples: list[Series], answers: list[str]) -> dict[str, float]:
        right = sum(series.label == answer for series, answer in zip(examples, answers, strict=True))
        return {"accuracy_percent": 100 * right / len(examples)}

    def card_values(self, name: str, parts: Parts, trained: Trained) -> dict[str, Any]:
        lengths = [len(series.rows) for series in parts.train]
        return {
            "set": name,
            "channels": trained.inputs.features,
            "training_examples": len(lengths),
            "shortest": min(lengths),
            "longest": max(lengths),
            "median": f"{np.median(lengths):.0f}",
        }

    def prefix(self, name: str) -> str:
        return name


if __name__ == "__main__":
    sys.exit(main(SeriesRecipe(), __doc__))
