"""Send recordings to a running service, and print when a model of train_keyword.py hears its keyword.

A recording is a WAV file, or a `.raw` file of bare samples, with 16,000 samples a second of 16 bits, in one channel.
`make programs PROGRAMS=recordings` unpacks some.
"""

from __future__ import annotations

import argparse
import sys
import wave
from pathlib import Path

import numpy as np
from training import service
from training.frames import FULL_SCALE, frames
from training.service import Service
from training.speech import RATE, Samples
from training.spotting import LATE, THRESHOLD, events, in_chunks, probabilities

SAMPLE_BYTES = 2
SILENCE = np.zeros(int(LATE * RATE), np.float32)
"""Follows a recording: a model hears a word only with the sound after it."""


class Unreadable(Exception):
    """A file is no recording, or has another format. The message names the right format."""


def read(file: Path) -> Samples:
    """Return the samples of a recording, between -1 and 1. A `.raw` file has only the samples. Raises Unreadable or OSError."""
    encoded = file.read_bytes() if file.suffix == ".raw" else _of_wav(file)
    whole = encoded[: len(encoded) // SAMPLE_BYTES * SAMPLE_BYTES]
    return np.frombuffer(whole, "<i2").astype(np.float32) / np.float32(FULL_SCALE)


def _of_wav(file: Path) -> bytes:
    try:
        with wave.open(str(file)) as recording:
            found = recording.getframerate(), recording.getnchannels(), 8 * recording.getsampwidth()
            encoded: bytes = recording.readframes(recording.getnframes())
    except (wave.Error, EOFError) as error:
        raise Unreadable(f"{file} is no WAV file of plain samples ({error})") from error
    if found != (RATE, 1, 8 * SAMPLE_BYTES):
        rate, channels, bits = found
        raise Unreadable(
            f"{file} has {rate} samples a second, {channels} channels and {bits} bits a sample; needed are {RATE}, 1 and "
            f"{8 * SAMPLE_BYTES}: convert it with ffmpeg -i {file.name} -ar {RATE} -ac 1 -sample_fmt s16 converted.wav"
        )
    return encoded


def main(line: list[str] | None = None) -> int:
    """Return 0 if all recordings were heard, 1 if the service does not answer or lacks the model, 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="recordings")
    parser.add_argument("--model", required=True, help="name of a model by train_keyword.py")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="of an event (default: %(default)s)")
    service.add_flags(parser)
    flags = parser.parse_args(line)
    try:
        recordings = [read(file) for file in flags.files]
    except (OSError, Unreadable) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        server = Service(flags.url, flags.key_file, flags.ca)
        models = server.models()
        if flags.model not in models:
            print(f"{flags.url} has no model {flags.model!r}: it has {', '.join(sorted(models))}", file=sys.stderr)
            return 1
        streams = [in_chunks(frames(np.concatenate([samples, SILENCE]))) for samples in recordings]
        outputs = server.streams(flags.model, streams)
    except OSError as error:
        print(service.problem(flags, error), file=sys.stderr)
        return 1
    keyword, count = models[flags.model]["head"]["labels"][1], 0
    for file, samples, replies in zip(flags.files, recordings, outputs, strict=True):
        heard = events(probabilities(replies, keyword), flags.threshold)
        count += len(heard)
        print(f"{file.name}, {len(samples) / RATE:.1f} s: {', '.join(f'{at:.2f} s' for at in heard) or 'not heard'}")
    print(f"{keyword!r} heard {count} times in {sum(map(len, recordings)) / RATE:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
