"""Train a model of any of six families that hears a keyword while audio streams in, and write it as a model folder with a card.

The data is speech of espeak-ng, which `make speech` installs; `pip install kaldi-native-fbank` turns it into frames of 10 ms. The model
labels every frame, and depends on earlier frames only, so a session of the service answers each chunk of audio.
"""

from __future__ import annotations

import argparse
import string
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from training import flags as setting_flags
from training import records
from training.encoders import STEP_ENCODERS
from training.frames import known_at
from training.keyword_data import DEVELOPMENT, TRAINING, Corpus, Windows, corpus, warped
from training.signal_model import SignalModel
from training.speech import MissingProgram
from training.spotting import NOTHING, Detector, Score, compare

from service.modeling import spec, store
from service.modeling.spec import TagHead

CARD_TEMPLATE = Path(__file__).with_name("keyword.card.md")
OTHER = "other"
"""The label of frames without a keyword."""
MAX_STEPS = 6000
"""Frames of the longest request: a minute."""
STREAM_SECONDS = 60.0
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. The training part has `streams` of a minute, which are cut into windows of
    `window` frames. For convolutions, `hidden` is the number of filters."""

    encoder: str = "sru"
    hidden: int = 96
    epochs: int = 14
    batch: int = 32
    rate: float = 0.005
    loudness: float = 2.0
    warp: float = 0.1
    front: int = 5
    streams: int = 300
    window: int = 400
    seed: int = 1


DEFAULTS = {encoder: Settings(encoder) for encoder in STEP_ENCODERS}


@dataclass(frozen=True)
class Trained:
    """development: the scores on the development streams, by threshold."""

    model: SignalModel
    seconds: float
    development: dict[float, Score]


def train(settings: Settings, training: Corpus, development: Corpus) -> Trained:
    """Return the model after the last epoch: the rate falls to zero, so no epoch has to be chosen."""
    torch.manual_seed(settings.seed)
    windows = Windows(training, settings.window)
    sample = windows.frames[:, ::100].flatten(0, 1).float()
    model = SignalModel(settings.encoder, sample, settings.hidden, 2, causal=True, front=settings.front).train()
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], settings.rate, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.epochs)
    start = time.monotonic()
    for _ in range(settings.epochs):
        for frames, labels, weights in windows.epoch(settings.batch):
            # In log energies, another loudness is another constant.
            louder = settings.loudness * torch.randn(len(frames), 1, 1)
            learn(model, warped(frames, settings.warp) + louder, labels, weights, optimizer)
        schedule.step()
    seconds = time.monotonic() - start
    return Trained(model.eval(), seconds, scores(model, development))


def learn(model: SignalModel, rows: Tensor, labels: Tensor, weights: Tensor, optimizer: torch.optim.Optimizer) -> None:
    outputs = model(rows, torch.full((len(rows),), rows.shape[1]))
    losses = nn.functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none")
    optimizer.zero_grad()
    torch.autograd.backward((losses * weights).sum() / weights.sum())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def scores(model: SignalModel, part: Corpus) -> dict[float, Score]:
    """Return the scores of a part by threshold, as the model in PyTorch alone has them."""
    totals = dict.fromkeys(THRESHOLDS, NOTHING)
    for rows, ends in zip(torch.from_numpy(part.frames), part.ends, strict=True):
        outputs = model(rows[None].float(), torch.tensor([len(rows)]))
        probabilities = outputs.softmax(-1)[0, :, 1].tolist()
        for threshold in THRESHOLDS:
            events = [known_at(frame) for frame in Detector(threshold).add(probabilities)]
            totals[threshold] += compare(ends, events, len(rows) * 0.01)
    return totals


def best(development: dict[float, Score]) -> float:
    """Return the threshold with the fewest errors, misses and false alarms; of equals, the highest."""
    return max(development, key=lambda threshold: (-errors(development[threshold]), threshold))


def errors(score: Score) -> int:
    return score.misses + score.false_alarms


def write(folder: Path, trained: Trained, settings: Settings, keyword: str, source: str) -> records.Record:
    """Write the version folder, and return what was measured. source: the flags of the data, for the card."""
    described = trained.model.spec(
        folder.parent.name,
        f"Whether the word {keyword!r} has just ended, for each frame of 10 ms",
        MAX_STEPS,
        TagHead(kind="tag", labels=(OTHER, keyword)),
    )
    store.write(folder, described, trained.model.tensors(), card="")
    threshold = best(trained.development)
    score = trained.development[threshold]
    values = asdict(settings) | {
        "name": folder.parent.name,
        "keyword": keyword,
        "encoder_description": trained.model.encoder.description,
        "flags": f"{source}{setting_flags.words(settings)}",
        "hours": f"{settings.streams * STREAM_SECONDS / 3600:.1f}",
        "threshold": threshold,
        "keywords": score.keywords,
        "misses": score.misses,
        "false_alarms": score.false_alarms,
        "minutes": f"{score.seconds / 60:.0f}",
    }
    (folder / spec.CARD).write_text(string.Template(CARD_TEMPLATE.read_text()).substitute(values))
    return {
        "kind": "training",
        "encoder": settings.encoder,
        "settings": asdict(settings),
        "threshold": threshold,
        "training_seconds": round(trained.seconds, 1),
        "bytes": records.folder_bytes(folder),
    }


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keyword", default="computer", help="an English word (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder that keeps the frames for the next training (default: none)")
    parser.add_argument("--models", type=Path, default="models", help="models folder to write to (default: %(default)s)")
    parser.add_argument("--name", help="name of the model (default: KEYWORD-ENCODER)")
    parser.add_argument("--results", type=Path, help="results file to which what was measured is appended (default: none)")
    parser.add_argument("--quick", action="store_true", help="a small model of a few streams")
    setting_flags.add(parser, DEFAULTS)
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    """Return 0 if the model was written, 2 if espeak-ng is missing."""
    flags = arguments(line)
    torch.set_num_threads(1)
    settings = DEFAULTS[getattr(flags, "encoder", "sru")]
    if flags.quick:
        settings = replace(settings, hidden=16, epochs=2, streams=2)
    settings = replace(settings, **setting_flags.given(flags, settings))
    minutes = 1 if flags.quick else 40
    try:
        training = corpus(flags.data, flags.keyword, TRAINING, settings.streams, STREAM_SECONDS)
        development = corpus(flags.data, flags.keyword, DEVELOPMENT, minutes, STREAM_SECONDS)
    except MissingProgram as error:
        print(error, file=sys.stderr)
        return 2
    trained = train(settings, training, development)
    folder = flags.models / (flags.name or f"{flags.keyword}-{settings.encoder}") / "1"
    source = f"--keyword {flags.keyword} " + ("--quick " if flags.quick else "")
    record = write(folder, trained, settings, flags.keyword, source) | {"quick": flags.quick}
    records.append(flags.results, record)
    score = trained.development[record["threshold"]]
    print(
        f"threshold {record['threshold']}: {score.misses} of {score.keywords} keywords missed and {score.false_alarms} false alarms in "
        f"{score.seconds / 60:.0f} min, trained in {record['training_seconds']:.0f} s, {folder} has {record['bytes']:,} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
