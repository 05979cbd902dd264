"""Reading files of a models folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_file(file: Path) -> bytes:
    """Return the content of a regular file; raises OSError. A FIFO or a device is refused: reading it could block for ever."""
    # Opening a FIFO without O_NONBLOCK waits for a writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)
