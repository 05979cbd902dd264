"""Reads recordings: WAV files, and files of bare samples."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from training.speech import RATE, Samples

SAMPLE_BYTES, FULL_SCALE = 2, 32768


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
