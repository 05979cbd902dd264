"""Send recordings to a running service, and print when a model of train_keyword.py hears its keyword.

A recording is a WAV file, or a `.raw` file of bare samples, with 16,000 samples a second of 16 bits, in one channel. `make recordings`
unpacks some.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import numpy as np
from training import recordings
from training.frames import frames
from training.hearing import Unavailable, heard, keyword_of
from training.speech import RATE
from training.spotting import LATE

SILENCE = np.zeros(int(LATE * RATE), np.float32)
"""Follows a recording: a model hears a word only with the sound after it."""


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="recordings")
    parser.add_argument("--model", required=True, help="name of a model by train_keyword.py")
    parser.add_argument("--threshold", type=float, default=0.9, help="of an event (default: %(default)s)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    """Return 0 if all recordings were heard, 1 if the service does not answer or lacks the model, 2 for a file that cannot be read."""
    flags = arguments(line)
    try:
        all_samples = [recordings.read(file) for file in flags.files]
    except (OSError, recordings.Unreadable) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        keyword = keyword_of(flags.url, flags.model)
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    events = 0
    for file, samples in zip(flags.files, all_samples, strict=True):
        rows = frames(np.concatenate([samples, SILENCE]))
        seconds = asyncio.run(heard(flags.url, flags.model, keyword, rows, flags.threshold))
        events += len(seconds)
        print(f"{file.name}, {len(samples) / RATE:.1f} s: {', '.join(f'{at:.2f} s' for at in seconds) or 'not heard'}")
    total = sum(map(len, all_samples)) / RATE
    print(f"{keyword!r} heard {events} times in {total:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
