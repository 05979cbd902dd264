"""Train a classifier of multivariate time series of any of six families, and write it as a model folder with a card.

The data is any set in the format of `training/series_sets.py`; series may differ in length. `--holdout` evaluates settings on a fifth
of the training part and writes nothing. The test part is read once, at the end.
"""

from __future__ import annotations

import argparse
import os
import string
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from training import flags as setting_flags
from training import records
from training.encoders import STEP_ENCODERS
from training.series_classifier import SeriesClassifier, Settings, fit
from training.series_sets import MissingSet, SeriesSet, hold_out, read_set

from service.modeling import spec, store
from service.modeling.spec import ClassifyHead

CARD_TEMPLATE = Path(__file__).with_name("series.card.md")
DEFAULTS = {encoder: Settings(encoder) for encoder in STEP_ENCODERS}
QUICK_SERIES = 40


@dataclass(frozen=True)
class Trained:
    """accuracy: the percentage on the test part, in PyTorch alone, with the weights as trained."""

    model: SeriesClassifier
    settings: Settings
    seconds: float
    accuracy: float


def train(series_set: SeriesSet, settings: Settings) -> Trained:
    model, seconds = fit(series_set.train, series_set.labels, settings)
    return Trained(model, settings, seconds, model.accuracy(series_set.test))


def write(folder: Path, trained: Trained, series_set: SeriesSet, source: str) -> records.Record:
    """Write the version folder, and return the figures. source: the flags of the data, for the card."""
    model, settings, name = trained.model, trained.settings, folder.parent.name
    lengths = [len(series.rows) for series in series_set.train]
    channels = series_set.train[0].rows.shape[1]
    described = model.spec(
        name,
        f"The label of a time series of {channels} channels of the set {series_set.name}",
        2 * max(lengths),
        ClassifyHead(kind="classify", pool=("max",), labels=series_set.labels),
    )
    store.write(folder, described, model.tensors(), card="")
    model.load(folder)
    stored = model.accuracy(series_set.test)
    values = asdict(settings) | {
        "name": name,
        "set": series_set.name,
        "channels": channels,
        "labels": ", ".join(series_set.labels),
        "shortest": min(lengths),
        "longest": max(lengths),
        "median": f"{np.median(lengths):.0f}",
        "encoder_description": model.encoder.description,
        "flags": f"{source} {setting_flags.words(settings)}",
        "examples": len(series_set.train),
        "test_examples": len(series_set.test),
        "stored": f"{stored:.1f}",
        "trained": f"{trained.accuracy:.1f}",
    }
    (folder / spec.CARD).write_text(string.Template(CARD_TEMPLATE.read_text()).substitute(values))
    return {
        "kind": "training",
        "set": series_set.name,
        "encoder": settings.encoder,
        "seed": settings.seed,
        "settings": asdict(settings),
        "trained_percent": trained.accuracy,
        "stored_percent": stored,
        "test_examples": len(series_set.test),
        "training_seconds": round(trained.seconds, 1),
        "bytes": records.folder_bytes(folder),
    }


def quick(series_set: SeriesSet, settings: Settings) -> tuple[SeriesSet, Settings]:
    """Return a small part of the set, with all labels, and a small model."""
    rest, few = hold_out(series_set.train)
    return replace(series_set, train=few or rest, test=series_set.test[:QUICK_SERIES]), replace(settings, hidden=8, epochs=2)


def held_out(series_set: SeriesSet, settings: Settings, seed: int) -> float:
    """Return the percentage on a fifth of the training part of a model that was trained on the rest."""
    train_part, development = hold_out(series_set.train, seed)
    model: SeriesClassifier = fit(train_part, series_set.labels, settings)[0]
    return model.accuracy(development)


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--set", default="JapaneseVowels", help="name of the set (default: %(default)s)")
    parser.add_argument("--models", type=Path, default="models", help="models folder to write to (default: %(default)s)")
    parser.add_argument("--name", help="name of the model (default: SET-ENCODER)")
    parser.add_argument("--holdout", type=int, metavar="SEED", help="evaluate on a random fifth of the training part")
    parser.add_argument("--results", type=Path, help="results file to which what was measured is appended (default: none)")
    parser.add_argument("--quick", action="store_true", help="a small model of a few series")
    setting_flags.add(parser, DEFAULTS)
    flags = parser.parse_args(line)
    flags.data = Path(flags.data) if flags.data else None
    return flags


def main(line: list[str] | None = None) -> int:
    """Return 0 if the model was written, 2 if the set is missing."""
    flags = arguments(line)
    torch.set_num_threads(1)
    settings = DEFAULTS[getattr(flags, "encoder", "sru")]
    try:
        series_set = read_set(flags.data, flags.set)
    except MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    if flags.quick:
        series_set, settings = quick(series_set, settings)
    settings = replace(settings, **setting_flags.given(flags, settings))
    if flags.holdout is not None:
        print(f"{held_out(series_set, settings, flags.holdout):.1f} % of a held-out fifth of the training part")
        return 0
    folder = flags.models / (flags.name or f"{flags.set}-{settings.encoder}") / "1"
    source = f"--set {flags.set}" + (" --quick" if flags.quick else "")
    record = write(folder, train(series_set, settings), series_set, source) | {"quick": flags.quick}
    records.append(flags.results, record)
    print(
        f"{record['stored_percent']:.1f} % of the {record['test_examples']} test series, "
        f"trained in {record['training_seconds']:.0f} s, {folder} has {record['bytes']:,} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
