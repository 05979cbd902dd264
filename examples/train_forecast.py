"""Train a model of any of six families that forecasts the next reading of a stream as quantiles, and write it with a card.

`signals.py` simulates the streams, so nothing has to be downloaded. The median is the forecast, the other quantiles bound an interval, and
a reading far outside its interval is unexpected: `evaluate_forecast.py` measures all three through a running service.
"""

from __future__ import annotations

import argparse
import string
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from signals import CHANNELS, streams
from torch import Tensor, nn
from training import flags as setting_flags
from training import records
from training.encoders import STEP_ENCODERS
from training.intervals import QUANTILES, coverage, ordered, pinball, width
from training.signal_model import SignalModel

from service.modeling import spec, store
from service.modeling.spec import RegressHead

CARD_TEMPLATE = Path(__file__).with_name("forecast.card.md")
TRAINING, DEVELOPMENT, TEST = range(10, 13)
"""The first number of every seed, by the purpose of its streams. `train_sensors.py` uses lower numbers."""
MAX_STEPS, DEVELOPMENT_STREAMS = 4096, 32
FIRST = 8
"""Steps of each stream that figures skip."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. A round trains once on `streams` new streams of `steps` readings."""

    encoder: str = "sru"
    hidden: int = 64
    rounds: int = 400
    streams: int = 64
    steps: int = 256
    rate: float = 0.01
    seed: int = 1


DEFAULTS = {encoder: Settings(encoder) for encoder in STEP_ENCODERS}


def train(settings: Settings) -> tuple[SignalModel, float]:
    """Return the model after the last round, and the seconds that its training took. The rate falls to zero."""
    torch.manual_seed(settings.seed)
    rows = torch.from_numpy(streams((TRAINING, settings.seed), settings.streams, settings.steps)).flatten(0, 1)
    outputs = len(CHANNELS) * len(QUANTILES)
    model = SignalModel(settings.encoder, rows, settings.hidden, outputs, causal=True).train()
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], settings.rate, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.rounds)
    start = time.monotonic()
    for number in range(settings.rounds):
        readings = torch.from_numpy(streams((TRAINING, settings.seed, number), settings.streams, settings.steps + 1))
        optimizer.zero_grad()
        torch.autograd.backward(loss(forecast(model, readings[:, :-1]), readings[:, 1:]))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval(), time.monotonic() - start


def forecast(model: SignalModel, readings: Tensor) -> Tensor:
    """Return (streams, steps, channels, quantiles) of (streams, steps, channels)."""
    values: Tensor = model(readings, torch.full((len(readings),), readings.shape[1]))
    return values.view(*readings.shape[:2], len(CHANNELS), len(QUANTILES))


def loss(forecasts: Tensor, following: Tensor) -> Tensor:
    """Return the mean pinball loss."""
    above = following[..., None] - forecasts
    quantiles = torch.tensor(QUANTILES)
    return torch.maximum(quantiles * above, (quantiles - 1) * above).mean()


@torch.no_grad()
def development(model: SignalModel, steps: int) -> records.Record:
    """Return the loss, the coverage and the width of the intervals on streams that the training did not use."""
    readings = streams((DEVELOPMENT, 0), DEVELOPMENT_STREAMS, steps + 1)
    values = forecast(model, torch.from_numpy(readings[:, :-1])).flatten(-2).double().numpy()
    forecasts, following = ordered(values, len(CHANNELS))[:, FIRST:], readings[:, 1 + FIRST :].astype(np.float64)
    return {
        "loss": pinball(forecasts, following),
        "coverage": coverage(forecasts, following),
        "width": width(forecasts),
    }


def write(folder: Path, model: SignalModel, settings: Settings, seconds: float, is_quick: bool) -> records.Record:
    """Write the version folder, read it back and return the figures."""
    head = RegressHead(kind="regress", pool=("last",), outputs=len(CHANNELS) * len(QUANTILES))
    description = f"Quantiles {', '.join(map(str, QUANTILES))} of the next reading of {', '.join(CHANNELS)}"
    store.write(folder, model.spec(folder.parent.name, description, MAX_STEPS, head), model.tensors(), card="")
    model.load(folder)
    measured = development(model, MAX_STEPS // 4)
    values = asdict(settings) | {
        "name": folder.parent.name,
        "encoder_description": model.encoder.description,
        "flags": ("--quick " if is_quick else "") + setting_flags.words(settings),
        "forecasts": f"{settings.rounds * settings.streams * settings.steps / 1e6:.1f} million",
        "loss": f"{measured['loss']:.4f}",
        "coverage": f"{100 * measured['coverage']:.1f}",
        "width": f"{measured['width']:.3f}",
    }
    (folder / spec.CARD).write_text(string.Template(CARD_TEMPLATE.read_text()).substitute(values))
    return {
        "kind": "training",
        "encoder": settings.encoder,
        "settings": asdict(settings),
        "quick": is_quick,
        **measured,
        "training_seconds": round(seconds, 1),
        "bytes": records.folder_bytes(folder),
    }


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default="models", help="models folder to write to (default: %(default)s)")
    parser.add_argument("--name", help="name of the model (default: forecast-ENCODER)")
    parser.add_argument("--results", type=Path, help="results file to which what was measured is appended (default: none)")
    parser.add_argument("--quick", action="store_true", help="a small model and a few rounds")
    setting_flags.add(parser, DEFAULTS)
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    flags = arguments(line)
    torch.set_num_threads(1)
    settings = DEFAULTS[getattr(flags, "encoder", "sru")]
    if flags.quick:
        settings = replace(settings, hidden=8, rounds=10, streams=16, steps=64)
    settings = replace(settings, **setting_flags.given(flags, settings))
    model, seconds = train(settings)
    folder = flags.models / (flags.name or f"forecast-{settings.encoder}") / "1"
    record = write(folder, model, settings, seconds, flags.quick)
    records.append(flags.results, record)
    print(
        f"pinball loss {record['loss']:.4f}, {100 * record['coverage']:.1f} % of readings inside intervals of width {record['width']:.3f}, "
        f"trained in {seconds:.0f} s, {folder} has {record['bytes']:,} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
