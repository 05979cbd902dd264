"""Detects whether a file has changed since it was read."""

from __future__ import annotations

import time
from pathlib import Path

SETTLED_SECONDS = 0.1


def modification(file: Path | None) -> tuple[int, int] | None:
    """Return a value that changes with the content of a file, None if the file cannot be found."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_ino)


def is_settled(modified: tuple[int, int] | None) -> bool:
    """Return whether a file with this `modification` was written at least SETTLED_SECONDS ago.

    Until then its writer may not have finished: many editors empty a file before they write it. A time in the future comes from another
    clock, as that of a file server, and counts as long ago.
    """
    return modified is None or not 0 <= time.time_ns() - modified[0] < SETTLED_SECONDS * 1e9
