"""Streams of synthetic speech with the places of a keyword, spoken by espeak-ng, a program that `make programs PROGRAMS=speech` installs.

Every stream has random voices, words, noise and loudness. The words are common English words and in training near misses of the keyword:
its beginnings and ends. Training and test streams have different speakers.
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

RATE = 16_000
"""Samples per second of every stream."""
SPOKEN_RATE = 22_050
"""Samples per second of espeak-ng."""
HEADER_BYTES = 44
LOUD = 0.02
"""Share of the peak below which the end of an utterance is silence."""
SHARE, NEAR = 0.6, 0.05
"""Share of the utterances that end with the keyword, and in training of near misses among the words."""
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029", "en-us-nyc")
# fmt: off
TRAINING = (
    "m1", "m3", "m4", "m6", "m7", "f1", "f2", "f4", "klatt2", "klatt4", "croak", "adam", "Alex", "Andrea", "Annie", "belinda",
    "benjamin", "boris", "caleb", "david", "Denis", "Diogo", "ed", "gustave", "Hugo", "iven", "Jacky", "john", "linda",
    "marcelo", "max", "michel", "pablo", "paul", "quincy", "rob", "sandro", "shelby", "steph", "travis", "victor", "zac",
)
TEST = (
    "m2", "m5", "m8", "f3", "f5", "klatt3", "Alicia", "Andy", "anika", "antonio", "edward", "Gene", "Henrique", "iven3",
    "Lee", "Marco", "Mario", "Michael", "miguel", "Mike", "norbert", "pedro", "robert", "steph2",
)
# fmt: on
WORDS = Path(__file__).with_name("words.txt").read_text().split()

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Voice:
    """speed: words per minute. pitch: 0 to 99."""

    name: str
    speed: int
    pitch: int

    @classmethod
    def random(cls, random: Generator, speakers: Sequence[str]) -> Voice:
        name = f"{pick(random, ACCENTS)}+{pick(random, speakers)}"
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
    settings = ["-v", voice.name, "-s", str(voice.speed), "-p", str(voice.pitch)]
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


def phrase(random: Generator, keyword: str, near: float, least: int, most: int) -> str:
    """Return words without the keyword, each followed by a space. No near miss follows another, which would sound like the keyword."""
    alike = near_misses(keyword) if near else ()
    words = [pick(random, alike if alike and random.random() < near else WORDS) for _ in range(random.integers(least, most))]
    pairs = zip(["", *words], words, strict=False)
    return "".join(f"{spoken} " for before, spoken in pairs if spoken != keyword and not (before in alike and spoken in alike))


def sentences(random: Generator, keyword: str, near: float) -> str:
    """Return one to four sentences without the keyword: espeak-ng pauses between them."""
    return ". ".join(phrase(random, keyword, near, 2, 12) for _ in range(random.integers(1, 5)))


def speech(random: Generator, speakers: Sequence[str], seconds: float, keyword: str, share: float, near: float) -> Stream:
    """Return speech with pauses. `share` of the utterances end with the keyword, the others are sentences without it."""
    parts, ends, length = [], [], 0
    while length < seconds * RATE:
        voice, has_keyword = Voice.random(random, speakers), random.random() < share
        samples = say(phrase(random, keyword, near, 0, 4) + keyword if has_keyword else sentences(random, keyword, near), voice)
        pause = np.zeros(int(RATE * random.uniform(0.05, 1.0)), np.float32)
        parts += [samples, pause]
        if has_keyword and length + len(samples) < seconds * RATE:
            ends.append((length + len(samples)) / RATE)
        length += len(samples) + len(pause)
    return Stream(np.concatenate(parts)[: int(seconds * RATE)], tuple(ends))


def stream(random: Generator, speakers: Sequence[str], seconds: float, keyword: str, share: float, near: float) -> Stream:
    """Return speech with noise, in half of the streams over another voice, and at a random loudness."""
    front = speech(random, speakers, seconds, keyword, share, near)
    samples = front.samples
    if random.random() < 0.5:
        behind = speech(random, speakers, seconds, keyword, 0.0, 0.0).samples
        samples = samples + decibels(random.uniform(-25, -12)) * behind
    noise = random.normal(size=len(samples)).astype(np.float32)
    samples = samples + decibels(random.uniform(-45, -20)) * noise
    return Stream((samples * decibels(random.uniform(-26, -6))).astype(np.float32), front.ends)


def decibels(level: float) -> float:
    """Return the factor of an amplitude."""
    return float(10 ** (level / 20))
