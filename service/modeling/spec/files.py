"""Reading files of a models folder, and writing files and folders that appear when they are complete."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from service.errors import ModelError

MAX_TOML_BYTES = 2 << 20
MAX_TABLE_DEPTH = 100
_PART, _DOT = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?)""", r"[ \t]*+\.[ \t]*+"
_KEY = re.compile(rf"({_PART}(?:{_DOT}{_PART}){{{MAX_TABLE_DEPTH}}})|{_PART}(?:{_DOT}{_PART})*+")
"""A key, or a value. The group matches a key of too many parts: the time of tomllib grows with their square."""
_confined_to: list[Path] = []
"""The models folder, if this process reads no files outside of it."""


@contextmanager
def confined(root: Path) -> Iterator[None]:
    """Within the context, no thread reads a file outside of a folder. Links within it are followed as long as they do not leave it."""
    before, _confined_to[:] = _confined_to[:], [root]
    try:
        yield
    finally:
        _confined_to[:] = before


def read_toml(file: Path) -> dict[str, Any] | None:
    """Return the content of a TOML file, or None if there is no such file; raises ModelError for every other defect."""
    try:
        text = read_file(file, limit=MAX_TOML_BYTES).decode()
        if any(key[1] for key in _KEY.finditer(text)):
            raise ModelError(f"{file}: a key has more than {MAX_TABLE_DEPTH} parts: nest fewer tables")
        return tomllib.loads(text)
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise ModelError(f"{file}: its tables or lists are nested too deeply") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not TOML, or an integer of too many digits
        raise ModelError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def read_file(file: Path, size: int = -1, *, limit: int | None = None) -> bytes:
    """Return the content of a regular file, or its first `size` bytes; raises OSError, also if it has more than `limit` bytes. A FIFO or a
    device is refused: reading it could block for ever."""
    # Opening a FIFO without O_NONBLOCK waits for a writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, and at most {limit} are read")
        # After opening: a check before it would race with a change of the path.
        if any(not _real_path(descriptor, file).is_relative_to(os.path.realpath(root)) for root in _confined_to):
            raise OSError(errno.EACCES, "it is a link out of the models folder: put the file itself there")
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read(size)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(place: Path, root: Path | None = None) -> Iterator[Path]:
    """Yield a path in a hidden folder for what takes `place` after the block; raises ModelError if it cannot be written.

    root: folder above `place` in which it appears, with its parent if that is missing; by default the parent.
    """
    try:
        if place.is_char_device() or place.is_fifo():
            yield place
            return
        place = place.resolve() if place.is_symlink() else place
        # One rename makes it visible, which raises OSError for a folder that exists by now.
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=root or place.parent) as hidden:
            written = Path(hidden) / place.relative_to(root or place.parent)
            yield written
            if place.is_file():
                shutil.copymode(place, written)
            moved, target = (written, place) if place.parent.exists() else (written.parent, place.parent)
            moved.replace(target)
    except OSError as error:
        raise ModelError(f"{place} cannot be written: {error.strerror or error}") from error


def _real_path(descriptor: int, file: Path) -> Path:
    """Return the path of an open file, without links. Only Linux tells it; elsewhere it is the path of the file that is there now."""
    try:
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return Path(os.path.realpath(file))
