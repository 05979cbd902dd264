"""Lists the variants of a text classifier in the table of compression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from training.compression import Choices, Job, compress, train_original, train_student, tune
from training.records import Record


@dataclass(frozen=True)
class Variant:
    """title: describes the variant, with names of choices; make: writes its folder; choices: the choices on which it depends; of: the
    variants that `make` reads."""

    title: str
    make: Callable[[Job, str], Record]
    choices: tuple[str, ...] = ()
    of: tuple[str, ...] = ("original",)


RANK, VOCABULARY = ("rank",), ("vocabulary",)
TUNING = ("dropout", "tuning_epochs", "tuning_rate")
STUDENT = ("dropout", "student_width", "student_hidden", "student_epochs")
DISTILLED = (*STUDENT, "temperature", "soft")


def int8(choices: Choices, texts: Path) -> list[str]:
    return ["--precision", "int8"]


def rank(choices: Choices, texts: Path) -> list[str]:
    return ["--rank", str(choices.rank)]


def vocabulary(choices: Choices, texts: Path) -> list[str]:
    return ["--vocabulary", str(choices.vocabulary), "--texts", str(texts)]


VARIANTS = {
    "original": Variant("original, float16", train_original, of=()),
    "int8": Variant("int8 for each column", partial(compress, of="original", flags=int8)),
    "rank": Variant("rank {rank}", partial(compress, of="original", flags=rank), RANK),
    "rank-tuned": Variant("rank {rank}, trained again", partial(tune, of="rank"), (*RANK, *TUNING), ("original", "rank")),
    "words": Variant("{vocabulary} words", partial(compress, of="original", flags=vocabulary), VOCABULARY),
    "words-tuned": Variant(
        "{vocabulary} words, trained again", partial(tune, of="words"), (*VOCABULARY, *TUNING), ("original", "words")
    ),
    "student": Variant(
        "student {student_width} × {student_hidden}, labels only", partial(train_student, is_distilled=False), STUDENT
    ),
    "distilled": Variant(
        "student {student_width} × {student_hidden}, distilled", partial(train_student, is_distilled=True), DISTILLED
    ),
    "distilled-int8": Variant(
        "student {student_width} × {student_hidden}, distilled, int8",
        partial(compress, of="distilled", flags=int8),
        DISTILLED,
        ("distilled",),
    ),
}
"""By name, each variant after the variants from which it is made."""
