"""Streams of synthetic speech with the places of a keyword, spoken by espeak-ng, a program that `make programs PROGRAMS=speech` installs.

Every stream has random voices, words, noise and loudness. The words are common English words, invented words, and in training near misses
of the keyword: its beginnings and ends. Training and test streams have different speakers.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from training.parts import MissingData
from training.speakers import data_folder

RATE = 16_000
"""Samples per second of every stream."""
SPOKEN_RATE = 22_050
"""Samples per second of espeak-ng."""
HEADER_BYTES = 44
LOUD = 0.02
"""Share of the peak below which the end of an utterance is silence."""
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029", "en-us-nyc")
WORDS = Path(__file__).with_name("words.txt").read_text().split()
# fmt: off
ONSETS = (
    "", "b", "br", "ch", "d", "f", "fl", "g", "h", "j", "k", "l", "m", "n", "p", "pl", "r", "s", "sh", "st", "t", "tr", "v",
    "w", "y",
)
VOWELS = (
    "a", "ay", "e", "ee", "i", "o", "oo", "oy", "ow", "u", "er",
)
CODAS = (
    "", "", "b", "d", "k", "l", "m", "n", "nd", "p", "r", "s", "st", "t", "x", "z",
)
# fmt: on

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Voice:
    """speed: words per minute. pitch: 0 to 99."""

    name: str
    speed: int
    pitch: int

    @classmethod
    def random(cls, random: Generator, names: tuple[str, ...]) -> Voice:
        name = f"{pick(random, ACCENTS)}+{pick(random, names)}"
        return cls(name, int(random.integers(120, 221)), int(random.integers(20, 81)))


@dataclass(frozen=True)
class Stream:
    """samples: between -1 and 1. ends: where the keyword ends, in seconds."""

    samples: Samples
    ends: tuple[float, ...]


def say(text: str, voice: Voice) -> Samples:
    """Return speech that ends with the last word, at `RATE`, with a peak of 1. Raises MissingData."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise MissingData(
            "espeak-ng is missing: install it with make programs PROGRAMS=speech (Debian: apt-get install espeak-ng)"
        )
    settings = [f"--path={data_folder(program)}", "-v", voice.name, "-s", str(voice.speed), "-p", str(voice.pitch)]
    spoken = subprocess.run([program, *settings, "--stdout", text], check=True, capture_output=True).stdout
    samples = resample(np.frombuffer(spoken[HEADER_BYTES:], "<i2").astype(np.float32))
    peak = np.abs(samples).max(initial=1e-9)
    loud = np.flatnonzero(np.abs(samples) > LOUD * peak)
    utterance: Samples = samples[: loud[-1] + 1 if len(loud) else 0] / peak
    return utterance


def resample(samples: Samples) -> Samples:
    """Return samples at `RATE` of samples at `SPOKEN_RATE`, filled up with silence to a tenth of a second."""
    tenths = len(samples) * 10 // SPOKEN_RATE + 1
    padded, count = tenths * SPOKEN_RATE // 10, tenths * RATE // 10
    spectrum = np.fft.rfft(samples, padded)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / padded)).astype(np.float32)


@lru_cache
def near_misses(keyword: str) -> tuple[str, ...]:
    """Return the beginnings and the ends of a keyword. A beginning lacks three letters, or it would sound like the keyword before `er`."""
    beginnings = [keyword[:end] for end in range(3, len(keyword) - 2)]
    return (*beginnings, *(keyword[start:] for start in range(2, len(keyword) - 2)))


def pick(random: Generator, choices: Sequence[str]) -> str:
    return choices[int(random.integers(len(choices)))]


def word(random: Generator, keyword: str, near: float) -> str:
    """Return a common word, an invented word, or with the probability `near` a near miss."""
    kind = random.random()
    if kind < near:
        return pick(random, near_misses(keyword))
    if kind < 0.5:
        return pick(random, WORDS)
    syllables = (pick(random, ONSETS) + pick(random, VOWELS) + pick(random, CODAS) for _ in range(random.integers(1, 4)))
    return "".join(syllables)


def phrase(random: Generator, keyword: str, near: float, least: int, most: int) -> str:
    """Return words without the keyword, each followed by a space. No near miss follows another, which would sound like the keyword."""
    words = [word(random, keyword, near) for _ in range(random.integers(least, most))]
    alike = {keyword, *near_misses(keyword)}
    pairs = zip(["", *words], words, strict=False)
    return "".join(f"{spoken} " for before, spoken in pairs if spoken != keyword and not (before in alike and spoken in alike))


def sentences(random: Generator, keyword: str, near: float) -> str:
    """Return one to four sentences without the keyword: espeak-ng pauses between them."""
    return ". ".join(phrase(random, keyword, near, 2, 12) for _ in range(random.integers(1, 5)))


def speech(random: Generator, names: tuple[str, ...], seconds: float, keyword: str, share: float, near: float) -> Stream:
    """Return speech with pauses. `share` of the utterances end with the keyword, the others are sentences without it."""
    parts, ends, length = [], [], 0
    voice = Voice.random(random, names)
    while length < seconds * RATE:
        if random.random() < 0.3:
            voice = Voice.random(random, names)
        has_keyword = random.random() < share
        samples = say(phrase(random, keyword, near, 0, 4) + keyword if has_keyword else sentences(random, keyword, near), voice)
        pause = np.zeros(int(RATE * random.uniform(0.05, 1.0)), np.float32)
        parts += [samples, pause]
        if has_keyword and length + len(samples) < seconds * RATE:
            ends.append((length + len(samples)) / RATE)
        length += len(samples) + len(pause)
    return Stream(np.concatenate(parts)[: int(seconds * RATE)], tuple(ends))


def stream(random: Generator, names: tuple[str, ...], seconds: float, keyword: str, share: float, near: float = 0.0) -> Stream:
    """Return speech with noise, in half of the streams over another voice, and at a random loudness. near: the share of near misses."""
    front = speech(random, names, seconds, keyword, share, near)
    samples = front.samples
    if random.random() < 0.5:
        behind = speech(random, names, seconds, keyword, 0.0, 0.0).samples
        samples = samples + decibels(random.uniform(-25, -12)) * behind
    samples = samples + decibels(random.uniform(-45, -20)) * noise(random, len(samples))
    return Stream((samples * decibels(random.uniform(-26, -6))).astype(np.float32), front.ends)


def noise(random: Generator, count: int) -> Samples:
    """Return noise of standard deviation 1 whose spectrum falls by 0 to 6 dB an octave."""
    spectrum = np.fft.rfft(random.normal(size=count)) / np.maximum(1, np.arange(count // 2 + 1)) ** random.uniform(0, 1)
    samples = np.fft.irfft(spectrum, count)
    scaled: Samples = (samples / samples.std()).astype(np.float32)
    return scaled


def decibels(level: float) -> float:
    """Return the factor of an amplitude."""
    return float(10 ** (level / 20))
