"""Train a model that hears a keyword while audio streams in, and write it as a model folder with a card.

The data is speech of espeak-ng, which `make_sets.py --keyword` makes: frames of 10 ms. The model labels every frame, and depends on earlier
frames only, so a session of the service answers each chunk of audio.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from training import keyword_sets
from training.batches import NO_TARGET, Batch, Row, shuffled_batches
from training.encoders import STEP_ENCODERS
from training.fitting import fit
from training.keyword_sets import Spoken
from training.model import Model, Scaled
from training.parts import Parts
from training.recipe import Recipe, Trained, main
from training.service import Advance, Service, ignore
from training.spotting import BANDS, FRAME_SECONDS, WINDOW_SECONDS, events, in_chunks, latencies, probabilities

from service.modeling.spec import SequenceInput
from service.modeling.spec.heads import TagHead

OTHER = "other"
"""The label of frames without a keyword."""
MAX_STEPS = 6000
"""Frames of the longest request: a minute."""
START, STOP = 0.03, 0.15
"""Seconds after the end of a keyword between which frames are positive: the model hears the following audio, and may not answer later."""
BEFORE, BEHIND = 0.1, 0.05
"""Seconds before the end of a keyword, and after its positive frames, in which frames do not count."""
CUT_FRAMES = 80
"""Frames at the beginning of a window in which a keyword may be incomplete."""
WEIGHTS = torch.tensor([1.0, 2.0])
"""Weight of a frame by its label: there are few positive frames."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. Streams are cut into windows of `window` frames, at other places in each epoch."""

    encoder: str
    hidden: int = 96
    epochs: int = 12
    batch: int = 16
    rate: float = 0.003
    window: int = 400
    seed: int = 1


class KeywordRecipe(Recipe):
    """An example is a stream, and an answer the probabilities of the keyword, one for each frame."""

    task, default_set = "keyword", "computer"
    settings: ClassVar = {encoder: Settings(encoder) for encoder in STEP_ENCODERS}
    quick: ClassVar = {"hidden": 16, "epochs": 2}

    def read(self, data: Path, name: str, settings: Settings) -> Parts:
        return Parts(keyword_sets.read(data, name, "train"), [], self.read_test(data, name))

    def read_test(self, data: Path, name: str) -> list[Spoken]:
        return keyword_sets.read(data, name, "test")

    def train(self, name: str, parts: Parts, settings: Settings, device: torch.device) -> Trained:
        rows = [Row(torch.from_numpy(stream.frames), targets(stream.ends, len(stream.frames))) for stream in parts.train]
        inputs = Scaled(torch.cat([row.inputs[::100] for row in rows]).float())
        model = Model(inputs, STEP_ENCODERS[settings.encoder](BANDS, settings.hidden, True), 2).to(device)
        shuffler, weights = random.Random(settings.seed), WEIGHTS.to(device)

        def cuts(epoch: int) -> list[Batch]:
            first = shuffler.randrange(settings.window)
            return shuffled_batches(
                [cut for row in rows for cut in windows(row, first, settings.window)], settings.batch, shuffler
            )

        def backward(batch: Batch) -> Tensor:
            batch = batch.to(device)
            scores = model(batch.inputs.float(), batch.lengths).transpose(1, 2)
            loss = nn.functional.cross_entropy(scores, batch.targets, weights, ignore_index=NO_TARGET)
            torch.autograd.backward(loss)
            return loss.detach()

        fitted = fit(model, settings.epochs, settings.rate, cuts, backward)
        description = f"Whether the word {name!r} has just ended, for each frame of 10 ms"
        inputs_of = SequenceInput(kind="features", features=BANDS, max_steps=MAX_STEPS)
        return Trained(model, fitted, description, inputs_of, TagHead(kind="tag", labels=(OTHER, name)))

    def answers(self, trained: Trained, examples: list[Spoken]) -> list[list[float]]:
        scores = trained.model.scores([torch.from_numpy(stream.frames.astype(np.float32)) for stream in examples])
        return [each.softmax(-1)[:, 1].tolist() for each in scores]

    def ask(self, service: Service, model: str, examples: list[Spoken], advance: Advance = ignore) -> list[list[float]]:
        """Send each stream through a session, as fast as it answers."""
        keyword = service.models()[model]["head"]["labels"][1]
        outputs = service.streams(model, [in_chunks(stream.frames) for stream in examples], advance)
        return [probabilities(each, keyword) for each in outputs]

    def quality(self, examples: list[Spoken], answers: list[list[float]]) -> dict[str, float]:
        """Return the share of missed keywords, the false alarms, and the median latency in the time of the audio."""
        heard = [events(answer) for answer in answers]
        found = [late for stream, times in zip(examples, heard, strict=True) for late in latencies(stream.ends, times)]
        keywords = sum(len(stream.ends) for stream in examples)
        hours = sum(map(len, answers)) * FRAME_SECONDS / 3600
        return {
            "missed_percent": 100 * (1 - len(found) / max(1, keywords)),
            "false_alarms_an_hour": (sum(map(len, heard)) - len(found)) / hours,
            "latency_ms": 1000 * float(np.median(found or math.nan)),
        }

    def card_values(self, name: str, parts: Parts, trained: Trained) -> dict[str, Any]:
        return {"keyword": name, "minutes": len(parts.train)}

    def prefix(self, name: str) -> str:
        return name


def targets(ends: tuple[float, ...], count: int) -> Tensor:
    """Return the target of each of `count` frames of a stream.

    A frame is positive (1) when it is complete between `START` and `STOP` seconds after the end of a keyword. Frames shortly before and
    after these have no target: the answers of the model do not matter there.
    """
    complete = torch.arange(count) * FRAME_SECONDS + WINDOW_SECONDS
    labels = torch.zeros(count, dtype=torch.long)
    for end in ends:
        labels[(complete >= end - BEFORE) & (complete < end + STOP + BEHIND)] = NO_TARGET
    for end in ends:
        labels[(complete >= end + START) & (complete < end + STOP)] = 1
    return labels


def windows(row: Row, first: int, length: int) -> list[Row]:
    """Return the windows of a stream from a first frame on. Frames have no target where a window may have cut off their keyword."""
    cuts = []
    for start in range(first, len(row.inputs) - length + 1, length):
        labels = row.targets[start : start + length].clone()
        labels[:CUT_FRAMES][labels[:CUT_FRAMES] == 1] = NO_TARGET
        cuts.append(Row(row.inputs[start : start + length], labels))
    return cuts


if __name__ == "__main__":
    sys.exit(main(KeywordRecipe(), __doc__))
