"""Which kernels last passed on a GPU: their hash, and whether they are still those. Nothing here needs a GPU, torch or pytest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

SUFFIXES = {".py", ".cu", ".cuh", ".json", ".toml"}
REMEDY = "run `make test-gpu` on a machine with an NVIDIA GPU, and commit tests/gpu/passed.json"


def kernels_hash(kernels: Path) -> str:
    """Of every path and content that decides what a kernel computes."""
    lines = (f"{sha256((kernels / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted(_names(kernels)))
    return sha256("".join(lines).encode()).hexdigest()


def warning(record: Path, kernels: Path) -> str | None:
    """What to do when the record is missing or is of other kernels; None when it is of these."""
    if not record.exists():
        return f"warning: no record that the kernels passed on a GPU: {REMEDY}"
    if _recorded(record) != kernels_hash(kernels):
        return f"warning: the kernels are not those that last passed on a GPU: {REMEDY}"
    return None


def _names(kernels: Path) -> Iterator[str]:
    """bench holds figures and peers, no kernels."""
    for file in kernels.rglob("*"):
        inside = file.relative_to(kernels)
        if file.suffix in SUFFIXES and file.is_file() and inside.parts[0] != "bench" and "__pycache__" not in inside.parts:
            yield inside.as_posix()


def _recorded(record: Path) -> object:
    """The hash in the record; None in one that a merge or an editor has spoilt."""
    try:
        return json.loads(record.read_bytes())["kernels"]
    except (ValueError, LookupError, TypeError):
        return None
