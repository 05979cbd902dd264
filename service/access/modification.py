"""Detects whether a file has changed since it was read."""

from __future__ import annotations

from pathlib import Path


def modification(file: Path | None) -> tuple[int, ...] | None:
    """Return a value that changes with the content of a file, None if the file cannot be found."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_ino, status.st_size)
