"""The folder in which compiled kernels are kept, for GPUs and for CPUs."""

from __future__ import annotations

import os
from pathlib import Path

CACHE, DEFAULT_CACHE = "SEQSERVE_CACHE", "~/.cache/seqserve"
"""The environment variable that names the folder of compiled kernels, and the folder if it is not set."""


def set_cache_folder(folder: Path) -> None:
    """Use this folder of compiled kernels from now on."""
    os.environ[CACHE] = str(folder)


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, which SEQSERVE_CACHE names, or None if it cannot be written. Creates it if needed."""
    path = readable_folder()
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return path if os.access(path, os.W_OK) else None


def readable_folder() -> Path | None:
    """Return the folder of compiled kernels, which may be missing or read-only; None if it is in the home of a user without one."""
    try:
        return Path(os.environ.get(CACHE, DEFAULT_CACHE)).expanduser()
    except RuntimeError:
        return None
