"""Anonymous files: memory that a process shares with the child processes that inherit it."""

from __future__ import annotations

import contextlib
import os
import tempfile


def create_shared_file(name: str, size: int = 0) -> int:
    """Return the descriptor of an anonymous file of `size` bytes. `name` appears in the system's process listings only."""
    descriptor = _create(name)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _create(name: str) -> int:
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a sandboxed kernel may lack it
            return os.memfd_create(name)
    with tempfile.TemporaryFile() as unlinked:
        return os.dup(unlinked.fileno())
