"""The memory limit of the container, and how much of it is in use."""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from service.control_groups import control_groups

UNLIMITED_BYTES = 1 << 62
"""Version 1 has a number near 2^63 in place of no limit."""
PAGES_READINGS = 30
"""Readings between two counts of the file pages, unless more than half of the limit is in use: the kernel takes long to count them, and
reclaims them only near the limit."""
MAX_FILE_BYTES = 1 << 16


class MemoryUse(NamedTuple):
    """Bytes in use and the limit, which is infinite without one."""

    used: float
    limit: float

    @property
    def share(self) -> float:
        return self.used / self.limit

    def beyond(self, share: float) -> float:
        """Return how many bytes are in use beyond a share of the limit; negative if there is room."""
        return self.used - share * self.limit


NO_LIMIT = MemoryUse(0, math.inf)


class MemoryLimit:
    """The control groups that may limit the memory of this process."""

    def __init__(self, root: Path = Path("/")) -> None:
        groups = [_Group.find(folder) for folder in control_groups("memory", root)]
        self._groups = [group for group in groups if group is not None]

    def read(self) -> MemoryUse:
        """Return the use of the group that is nearest to its limit. A limit may change while the service runs."""
        return max([NO_LIMIT, *[group.read() for group in self._groups]], key=lambda use: (use.share, -use.limit))


def return_freed_memory() -> None:
    """Return memory that this process has freed to the system. The C library otherwise keeps it for later."""
    with suppress(AttributeError, OSError):  # only glibc has the function
        ctypes.CDLL(None).malloc_trim(0)


@dataclass
class _Group:
    """The open files of one group: each tick of a frontend reads them. prefix: of the lines of `stat` that count the groups below too.

    pages: file pages as read last, which are good for `readings` further readings.
    """

    prefix: bytes
    limit: int
    used: int
    stat: int
    pages: int = 0
    readings: int = 0

    @classmethod
    @cache
    def find(cls, folder: Path) -> _Group | None:
        """Return the group of a folder, the same for all callers in this process; None if it has no readable files of either version."""
        for limit, used, prefix in (
            ("memory.max", "memory.current", b""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_"),
        ):
            with suppress(OSError):
                return cls(prefix, *[os.open(folder / name, os.O_RDONLY) for name in (limit, used, "memory.stat")])
        return None

    def read(self) -> MemoryUse:
        """Return the bytes in use without file pages, which the kernel reclaims before it kills. Unreadable files mean no limit."""
        try:
            text = os.pread(self.limit, MAX_FILE_BYTES, 0).strip()
            if text == b"max" or not 0 < (limit := int(text)) < UNLIMITED_BYTES:
                return NO_LIMIT
            used = int(os.pread(self.used, MAX_FILE_BYTES, 0))
            self.readings -= 1
            if used > limit / 2 or self.readings < 0:
                stat = dict([line.split(b" ", 1) for line in os.pread(self.stat, MAX_FILE_BYTES, 0).splitlines()])
                self.pages = sum([int(stat.get(self.prefix + name, 0)) for name in (b"inactive_file", b"active_file")])
                self.readings = PAGES_READINGS
            return MemoryUse(max(0, used - self.pages), limit)
        except (OSError, ValueError):
            return NO_LIMIT
