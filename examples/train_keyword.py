"""Train a model of any of six families that hears a keyword while audio streams in, and write it as a model folder with a card.

The data is speech of espeak-ng, which `make speech` installs; `pip install kaldi-native-fbank` turns it into frames of 10 ms. The model
labels every frame, and depends on earlier frames only, so a session of the service answers each chunk of audio.
"""

from __future__ import annotations

import argparse
import string
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from training import flags as setting_flags
from training import records
from training.encoders import STEP_ENCODERS
from training.keyword_data import (
    DEVELOPMENT,
    DEVELOPMENT_BABBLE,
    TRAINING,
    TRAINING_BABBLE,
    corpus,
)
from training.keyword_fitting import Settings, Trained, best, train
from training.speech import MissingProgram

from service.modeling import spec, store
from service.modeling.spec import TagHead

CARD_TEMPLATE = Path(__file__).with_name("keyword.card.md")
OTHER = "other"
"""The label of frames without a keyword."""
MAX_STEPS = 6000
"""Frames of the longest request: a minute."""
STREAM_SECONDS = 60.0
DEVELOPMENT_MINUTES = (60, 240)
"""Minutes of streams with the keyword, and of babble."""

DEFAULTS = {encoder: Settings(encoder) for encoder in STEP_ENCODERS}


def write(folder: Path, trained: Trained, settings: Settings, keyword: str, source: str) -> records.Record:
    """Write the version folder, and return the figures. source: the flags of the data, for the card."""
    described = trained.model.spec(
        folder.parent.name,
        f"Whether the word {keyword!r} has just ended, for each frame of 10 ms",
        MAX_STEPS,
        TagHead(kind="tag", labels=(OTHER, keyword)),
    )
    store.write(folder, described, trained.model.tensors(), card="")
    threshold = best(*trained.development)
    spoken, babble = (scores[threshold] for scores in trained.development)
    values = asdict(settings) | {
        "name": folder.parent.name,
        "keyword": keyword,
        "encoder_description": trained.model.encoder.description,
        "flags": f"{source}{setting_flags.words(settings)}",
        "hours": f"{(settings.streams + settings.babble) * STREAM_SECONDS / 3600:.1f}",
        "threshold": threshold,
        "keywords": spoken.keywords,
        "misses": spoken.misses,
        "false_alarms": babble.false_alarms,
        "minutes": f"{babble.seconds / 60:.0f}",
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
    settings = DEFAULTS[getattr(flags, "encoder", "sru")]
    if flags.quick:
        settings = replace(settings, hidden=16, epochs=2, streams=2, babble=1)
    settings = replace(settings, **setting_flags.given(flags, settings))
    spoken_minutes, babble_minutes = (1, 1) if flags.quick else DEVELOPMENT_MINUTES
    parts = (
        (TRAINING, settings.streams),
        (TRAINING_BABBLE, settings.babble),
        (DEVELOPMENT, spoken_minutes),
        (DEVELOPMENT_BABBLE, babble_minutes),
    )
    try:
        *training, spoken, babble = (
            corpus(flags.data, flags.keyword, part, streams, STREAM_SECONDS) for part, streams in parts
        )
    except MissingProgram as error:
        print(error, file=sys.stderr)
        return 2
    used = time.process_time()
    trained = train(settings, training, [spoken, babble])
    folder = flags.models / (flags.name or f"{flags.keyword}-{settings.encoder}") / "1"
    source = f"--keyword {flags.keyword} " + ("--quick " if flags.quick else "")
    record = write(folder, trained, settings, flags.keyword, source)
    record |= {"quick": flags.quick, "cpu_seconds": round(time.process_time() - used, 1)}
    records.append(flags.results, record)
    on_speech, on_babble = (scores[record["threshold"]] for scores in trained.development)
    print(
        f"threshold {record['threshold']}: {on_speech.misses} of {on_speech.keywords} keywords missed, {on_babble.false_alarms} false "
        f"alarms in {on_babble.seconds / 60:.0f} min of babble, trained in {record['training_seconds']:.0f} s "
        f"({record['cpu_seconds']:.0f} s of processors), {folder} has {record['bytes']:,} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
