"""Train a model that hears a keyword while audio streams in, and write it as a model folder with a card.

The data is speech of espeak-ng, which `make programs PROGRAMS=speech` installs; `pip install kaldi-native-fbank` turns it into frames of
10 ms. The model labels every frame, and depends on earlier frames only, so a session of the service answers each chunk of audio. A folder
in `--data` keeps the frames for the next training and for `evaluate.py`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from training.encoders import STEP_ENCODERS
from training.fitting import fit
from training.frames import BANDS, FRAME_SECONDS, known_at
from training.keyword_data import LEARNING_PARTS, TEST, TEST_BABBLE, Cut, Spoken, Windows, corpus, varied
from training.model import Model, Scaled
from training.parts import Parts
from training.recipe import Recipe, Trained, main
from training.service import Advance, Service, ignore
from training.spotting import NOTHING, THRESHOLDS, Detector, Score, best, compare, in_chunks, probabilities

from service.modeling.spec import SequenceInput, TagHead

OTHER = "other"
"""The label of frames without a keyword."""
MAX_STEPS = 6000
"""Frames of the longest request: a minute."""
SECONDS, TEST_SECONDS = 60.0, 300.0
"""Seconds of a stream of the training and development part, and of the test part."""
AT_ONCE = 16
"""Streams that are evaluated at once."""
MIXED: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this processor multiplies matrices of bfloat16, which is faster. The weights and the recurrence stay float32."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. The training part has `streams` of a minute with the keyword and `babble` without
    it, which are cut into windows of `window` frames. Each `every` epochs, one epoch has all windows. The others have `share` of them,
    mostly those with large losses. At the start, recurrent layers remember 1 to `memory` frames. For convolutions, `hidden` is the number
    of filters. The development part has `minutes` with the keyword, and four times as many of babble."""

    encoder: str
    hidden: int = 96
    epochs: int = 32
    every: int = 16
    share: float = 0.3
    batch: int = 16
    rate: float = 0.003
    loudness: float = 1.0
    warp: float = 0.05
    tilt: float = 0.5
    front: int = 5
    memory: float = 60.0
    streams: int = 300
    babble: int = 240
    minutes: int = 60
    window: int = 400
    seed: int = 1


class KeywordRecipe(Recipe):
    """An example is a stream, and an answer the probabilities of the keyword, one for each frame."""

    task, default_set, set_flag = "keyword", "computer", "--keyword"
    settings: ClassVar = {encoder: Settings(encoder) for encoder in STEP_ENCODERS}
    quick: ClassVar = {"hidden": 16, "epochs": 2, "streams": 2, "babble": 1, "minutes": 1}
    quick_options: ClassVar = {"hours": 0.05}
    options = argparse.Namespace(threshold=None, hours=10.0)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(data=None)
        parser.add_argument("--threshold", type=float, help="of an event (default: the training chooses one)")
        parser.add_argument("--hours", type=float, default=10.0, help="of babble in the test part (default: %(default)s)")

    def read(self, data: Path, name: str, settings: Settings) -> Parts:
        counts = (settings.streams, settings.babble, settings.minutes, 4 * settings.minutes)
        parts = zip(LEARNING_PARTS, counts, strict=True)
        streams = [corpus(data, name, part, [(number,) for number in range(count)], SECONDS) for part, count in parts]
        return Parts(streams[0] + streams[1], streams[2] + streams[3], self.read_test(data, name))

    def read_test(self, data: Path, name: str) -> list[Spoken]:
        """Return a tenth of `--hours`, at least a stream, of the keyword among other words, and `--hours` of babble."""
        count = max(1, round(3600 * self.options.hours / TEST_SECONDS))
        seeds = [(1, number) for number in range(count)]
        spoken = corpus(data, name, TEST, seeds[: -(-count // 10)], TEST_SECONDS)
        return spoken + corpus(data, name, TEST_BABBLE, seeds, TEST_SECONDS)

    def train(self, name: str, parts: Parts, settings: Settings, device: torch.device) -> Trained:
        windows = Windows(parts.train, settings.window)
        inputs = Scaled(windows.frames[:, ::100].flatten(0, 1).float(), settings.front, settings.hidden)
        encoder = STEP_ENCODERS[settings.encoder](settings.hidden if settings.front else BANDS, settings.hidden, True)
        encoder.remember(settings.memory)
        model = Model(inputs, encoder, 2).to(device)

        def cuts(epoch: int) -> list[Cut]:
            return windows.epoch(settings.batch, settings.share if epoch % settings.every else 1.0)

        def backward(cut: Cut) -> Tensor:
            """Add the gradients, and remember the loss of each window."""
            frames, labels, weights = windows.batch(cut)
            frames = varied(frames, settings.loudness, settings.warp, settings.tilt)
            with torch.autocast("cpu", torch.bfloat16, enabled=MIXED):
                outputs = model(frames.to(device), torch.full((len(frames),), frames.shape[1], device=device)).float().cpu()
            losses = weights * nn.functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none")
            loss = losses.sum() / weights.sum()
            torch.autograd.backward(loss)
            windows.losses[cut.numbers] = losses.detach().sum(1)
            return loss.detach()

        fitted = fit(model, settings.epochs, settings.rate, cuts, backward, every_batch=False)
        trained = Trained(
            model,
            fitted,
            f"Whether the word {name!r} has just ended, for each frame of 10 ms",
            SequenceInput(kind="features", features=BANDS, max_steps=MAX_STEPS),
            TagHead(kind="tag", labels=(OTHER, name)),
        )
        if self.options.threshold is None:
            spoken, babble = parts.development[: settings.minutes], parts.development[settings.minutes :]
            answers = [self.answers(trained, streams) for streams in (spoken, babble)]
            self.options.threshold = best(
                {threshold: total(spoken, answers[0], threshold) for threshold in THRESHOLDS},
                {threshold: total(babble, answers[1], threshold) for threshold in THRESHOLDS},
            )
        return trained

    def answers(self, trained: Trained, examples: list[Spoken]) -> list[list[float]]:
        answers = []
        for first in range(0, len(examples), AT_ONCE):
            rows = [torch.from_numpy(stream.frames.astype(np.float32)) for stream in examples[first : first + AT_ONCE]]
            answers += [scores.softmax(-1)[:, 1].tolist() for scores in trained.model.scores(rows)]
        return answers

    def ask(self, service: Service, model: str, examples: list[Spoken], advance: Advance = ignore) -> list[list[float]]:
        """Send each stream through a session, as fast as it answers."""
        keyword = service.models()[model]["head"]["labels"][1]
        answers = []
        for first in range(0, len(examples), AT_ONCE):
            streams = [in_chunks(stream.frames) for stream in examples[first : first + AT_ONCE]]
            answers += [probabilities(outputs, keyword) for outputs in service.streams(model, streams, advance)]
        return answers

    def quality(self, examples: list[Spoken], answers: list[list[float]]) -> dict[str, float]:
        """Return the share of missed keywords, the false alarms of babble, and the median latency in the time of the audio."""
        threshold = self.options.threshold or Detector.threshold
        babble = [number for number, stream in enumerate(examples) if not stream.ends]
        score = total(examples, answers, threshold)
        alarms = total([examples[number] for number in babble], [answers[number] for number in babble], threshold)
        return {
            "missed_percent": 100 * score.misses / max(1, score.keywords),
            "false_alarms_an_hour": alarms.false_alarms_an_hour,
            "latency_ms": 1000 * float(np.median(score.latencies or math.nan)),
            "threshold": threshold,
        }

    def card_values(self, name: str, parts: Parts, trained: Trained) -> dict[str, Any]:
        return {
            "keyword": name,
            "hours": f"{len(parts.train) * SECONDS / 3600:.1f}",
            "threshold": self.options.threshold,
        }

    def prefix(self, name: str) -> str:
        return name


def total(streams: Sequence[Spoken], answers: Sequence[list[float]], threshold: float) -> Score:
    """Return the score of the events in streams."""
    score = NOTHING
    for stream, answer in zip(streams, answers, strict=True):
        events = [known_at(frame) for frame in Detector(threshold).add(answer)]
        score += compare(stream.ends, events, len(answer) * FRAME_SECONDS)
    return score


if __name__ == "__main__":
    sys.exit(main(KeywordRecipe(), __doc__))
