"""The requirements of a CUDA source on its launcher: names that must be defined, and members of its structures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from kernels.compile import _source_text


class Member(NamedTuple):
    """A member of a structure, such as ``const Half* filters[BANKS]``. align: its alignas, or 0."""

    kind: str
    name: str
    sizes: tuple[str, ...] = ()
    align: int = 0


def text(source: Path) -> str:
    """Return a source with its includes and without comments."""
    return re.sub(r"//.*", "", _source_text(source))


def undefined_names(source: Path) -> set[str]:
    """Return the names in capitals that a source uses and does not define."""
    code = re.sub(r'"[^"\n]*"', "", text(source))
    used = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", code))
    defined = set(re.findall(r"#define (\w+)|template <int (\w+)>", code))
    names = {name for pair in defined for name in pair}
    for constants in re.findall(r"constexpr \w+ (.*?);", code, re.DOTALL):
        names |= set(re.findall(r"(\w+) = ", constants))
    return used - names


def members(source: Path, structure: str) -> list[Member]:
    """Return the members of a structure before its first blank line, in order."""
    match = re.search(rf"struct {structure} \{{(.*?)\n(\n|\}})", text(source), re.DOTALL)
    assert match is not None, structure
    declared = re.findall(
        r"^    (?:alignas\((\d+)\) )?(?:const )?((?:unsigned )?(?:long long|\w+)\*?) ([^;(]+);", match[1], re.MULTILINE
    )
    return [_member(kind, name, align) for align, kind, names in declared for name in names.split(", ")]


def _member(kind: str, name: str, align: str) -> Member:
    return Member(kind, name.split("[")[0], tuple(re.findall(r"\[([^]]*)\]", name)), int(align or 0))
