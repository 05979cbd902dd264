"""The record of the kernels that last passed on a GPU, and whether it is current. Nothing here needs a GPU, torch or pytest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

SUFFIXES = {".py", ".cu", ".cuh", ".json", ".toml"}
REMEDY = "run `make test-gpu` on a machine with an NVIDIA GPU, and commit tests/gpu/passed.json"


def kernels_hash(kernels: Path) -> str:
    """Return the hash of the paths and contents of all files that decide what a kernel computes."""
    lines = (f"{sha256((kernels / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted(_names(kernels)))
    return sha256("".join(lines).encode()).hexdigest()


def warning(record: Path, kernels: Path) -> str | None:
    """Return a warning if the record is missing or belongs to other kernels, or None if it is current."""
    if not record.exists():
        return f"warning: no record that the kernels passed on a GPU: {REMEDY}"
    if _recorded(record) != kernels_hash(kernels):
        return f"warning: the kernels have changed since they last passed on a GPU: {REMEDY}"
    return None


def _names(kernels: Path) -> Iterator[str]:
    """Yield the paths of the kernels' files. The benchmarks contain no kernels of the library."""
    for file in kernels.rglob("*"):
        inside = file.relative_to(kernels)
        if file.suffix in SUFFIXES and file.is_file() and inside.parts[0] != "bench" and "__pycache__" not in inside.parts:
            yield inside.as_posix()


def _recorded(record: Path) -> object:
    """Return the hash in the record, or None if the record is damaged."""
    try:
        return json.loads(record.read_bytes())["kernels"]
    except (ValueError, LookupError, TypeError):
        return None
