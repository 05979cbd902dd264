"""The memory limit of the container, and how much of it is in use."""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from service.control_groups import control_groups

UNLIMITED_BYTES = 1 << 62
"""Version 1 has a number near 2^63 in place of no limit."""


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
        return max([NO_LIMIT, *(group.read() for group in self._groups)], key=lambda use: (use.share, -use.limit))


def return_freed_memory() -> None:
    """Return memory that this process has freed to the system. The C library otherwise keeps it for later."""
    with suppress(AttributeError, OSError):  # only glibc has the function
        ctypes.CDLL(None).malloc_trim(0)


class _Group(NamedTuple):
    """The files of one group. prefix: of the lines of `stat` that count the groups below too."""

    limit: Path
    used: Path
    stat: Path
    prefix: str

    @classmethod
    def find(cls, folder: Path) -> _Group | None:
        """Return the group of a folder; None if it has no files of either version."""
        for limit, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            if (folder / limit).is_file():
                return cls(folder / limit, folder / used, folder / "memory.stat", prefix)
        return None

    def read(self) -> MemoryUse:
        """Return the bytes in use without file pages, which the kernel reclaims before it kills. Unreadable files mean no limit."""
        try:
            limit = self.limit.read_text().strip()
            if limit == "max" or not 0 < int(limit) < UNLIMITED_BYTES:
                return NO_LIMIT
            used = int(self.used.read_text())
            stat = dict(line.split(" ", 1) for line in self.stat.read_text().splitlines())
            pages = sum(int(stat.get(f"{self.prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
            return MemoryUse(max(0, used - pages), int(limit))
        except (OSError, ValueError):
            return NO_LIMIT
