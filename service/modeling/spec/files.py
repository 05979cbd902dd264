"""Reading files of a models folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def read_file(file: Path, size: int = -1) -> bytes:
    """Return the content of a regular file, or its first `size` bytes; raises OSError. A FIFO or a device is refused: reading it could
    block for ever."""
    # Opening a FIFO without O_NONBLOCK waits for a writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        # After opening: a check before it would race with a change of the path.
        if any(not _real_path(descriptor, file).is_relative_to(os.path.realpath(root)) for root in _confined_to):
            raise OSError(errno.EACCES, "it is a link out of the models folder: put the file itself there")
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read(size)
    finally:
        os.close(descriptor)


def _real_path(descriptor: int, file: Path) -> Path:
    """Return the path of an open file, without links. Only Linux tells it; elsewhere it is the path of the file that is there now."""
    try:
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return Path(os.path.realpath(file))
