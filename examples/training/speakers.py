"""The speakers of espeak-ng by the purpose of their speech: some come with it, the others have random throats and manners of speaking.

An invented speaker is a file. The files are in a folder that espeak-ng reads in place of its installed data.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.random import Generator

# fmt: off
NAMED = (
    "m1", "m4", "m6", "m7", "f2", "f4", "klatt2", "croak", "adam", "Alex", "Annie", "belinda", "benjamin", "caleb", "david",
    "Denis", "ed", "gustave", "Hugo", "Jacky", "john", "linda", "max", "michel", "pablo", "quincy", "rob", "sandro", "steph",
    "travis", "victor",
)
DEVELOPMENT = (
    "m3", "f1", "klatt4", "Andrea", "boris", "Diogo", "iven", "marcelo", "paul", "shelby", "zac",
)
TEST = (
    "m2", "m5", "m8", "f3", "f5", "klatt3", "Alicia", "Andy", "anika", "antonio", "edward", "Gene", "Henrique", "iven3",
    "Lee", "Marco", "Mario", "Michael", "miguel", "Mike", "norbert", "pedro", "robert", "steph2",
)
# fmt: on
INVENTED = tuple(f"invented{number}" for number in range(220))
"""The limit: espeak-ng reads at most 349 files of voices."""
TRAINING = NAMED * 5 + INVENTED
"""Two in five utterances have a speaker that comes with espeak-ng."""
FORMANTS = 9
DATA, ENGLISH, VARIANTS = "espeak-ng-data", "lang/gmw", "voices/!v"


_LOCK = Lock()
"""Threads that speak at once share a folder."""


def data_folder(program: str) -> Path:
    """Return a folder for `--path` of espeak-ng: the installed data and the invented speakers. It is deleted at exit."""
    with _LOCK:
        return _made_folder(program)


@lru_cache
def _made_folder(program: str) -> Path:
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    installed = Path(version.partition("Data at: ")[2].strip())
    made = Path(tempfile.mkdtemp(prefix="speakers-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    common = [file for file in installed.iterdir() if file.name not in ("lang", "voices")]
    voices = [installed / VARIANTS / name for name in (*NAMED, *DEVELOPMENT, *TEST)]
    for file in [*common, installed / ENGLISH, *voices]:
        link = made / DATA / file.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    for number, name in enumerate(INVENTED):
        (made / DATA / VARIANTS / name).write_text(description(name, np.random.default_rng(number)))
    return made


def description(name: str, random: Generator) -> str:
    """Return the file of a random speaker, as docs/voices.md of espeak-ng describes it. Values are percentages of the default voice."""
    low = int(np.exp(random.uniform(np.log(60), np.log(200))))
    throat = np.exp(random.normal(0.04, 0.11))
    lines = [f"pitch {low} {int(low * random.uniform(1.2, 1.8))}"]
    for number in range(FORMANTS):
        frequency = 100 * throat * np.exp(random.normal(0, 0.06 if number else 0.02))
        strength, width = 100 * np.exp(random.normal((0, 0.05), (0.22, 0.2)))
        lines.append(f"formant {number} {frequency:.0f} {strength:.0f} {width:.0f}")
    manners = (
        (0.2, f"klatt {random.integers(1, 7)}"),
        (0.5, f"voicing {100 * np.exp(random.normal(0, 0.4)):.0f}"),
        (0.5, f"consonants {random.integers(40, 150)} {random.integers(30, 150)}"),
        (0.3, f"tone {random.integers(60, 600)} 255 {random.integers(700, 1600)} {random.integers(20, 255)} "
              f"3000 {random.integers(20, 255)}"),
        (0.3, f"roughness {random.integers(1, 6)}"),
        (0.4, f"flutter {random.integers(0, 21)}"),
        (0.2, f"echo {random.integers(10, 150)} {random.integers(5, 25)}"),
        (0.3, f"intonation {random.integers(1, 5)}"),
        (0.2, "breath 0 " + " ".join(str(value) for value in random.integers(0, 8, 7))),
        (0.3, "stressAdd " + " ".join(str(value) for value in random.integers(-20, 140, 8))),
    )  # fmt: skip
    lines += [line for share, line in manners if random.random() < share]
    return "\n".join(["language variant", f"name {name}", *lines, ""])
