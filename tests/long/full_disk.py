"""Processes that can write to no file, as on a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_disk(pids: Iterable[int]) -> Iterator[None]:
    """Let every write of these processes to a file fail until the end of the block. Python gets an OSError, as on a full disk."""
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, most) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
    try:
        yield
    finally:
        for pid, before in limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
