"""A memory control group of the kernel, with a server in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service.control_groups import control_groups
from tests.serving import eventually

PROGRAM = """
import os, runpy
with open({procs!r}, "w") as file:
    file.write(str(os.getpid()))
runpy.run_module("service", run_name="__main__", alter_sys=True)
"""
BALLAST = """
import os, sys
with open({procs!r}, "w") as file:
    file.write(str(os.getpid()))
held = b"x" * {size}
print("held", flush=True)
sys.stdin.read()
"""
LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""The files with the limit and the use, of either version."""


class MemoryGroup:
    """A group without a limit until `limit_to`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._limit = next(name for name in LIMITS if (folder / name).exists())
        self.limit_bytes = 0

    @property
    def program(self) -> tuple[str, str]:
        """The arguments of Python that start the command line of the service in the group, with all its processes."""
        return "-c", PROGRAM.format(procs=str(self._folder / "cgroup.procs"))

    @property
    def share(self) -> float:
        """The share of the limit that is in use, with file pages that the kernel would take back."""
        return int((self._folder / LIMITS[self._limit]).read_text()) / self.limit_bytes

    def limit_to(self, share: float) -> None:
        """Set the limit, so that this share of it is in use now."""
        self.limit_bytes = round(int((self._folder / LIMITS[self._limit]).read_text()) / share)
        (self._folder / self._limit).write_text(str(self.limit_bytes))

    @contextmanager
    def ballast(self, share: float) -> Iterator[None]:
        """Let another process in the group fill it up to a share of the limit."""
        size = round((share - self.share) * self.limit_bytes)
        code = BALLAST.format(procs=str(self._folder / "cgroup.procs"), size=size)
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            yield
            assert process.poll() is None, "the process was killed"
            process.communicate()

    def kills(self) -> int:
        """Return how many processes the kernel killed for want of memory."""
        events = self._folder / ("memory.events" if self._limit == "memory.max" else "memory.oom_control")
        return int(dict(line.split() for line in events.read_text().splitlines())["oom_kill"])

    def failures(self) -> int:
        """Return how often an allocation met the limit."""
        if self._limit == "memory.max":
            return int(dict(line.split() for line in (self._folder / "memory.events").read_text().splitlines())["max"])
        return int((self._folder / "memory.failcnt").read_text())

    def remove(self) -> None:
        def gone() -> bool:
            try:
                self._folder.rmdir()
            except OSError:  # a process of it still ends
                return False
            return True

        eventually(gone)


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """Create a group below that of this process, and remove it at the end. Skips the test where that is not possible."""
    parents = [folder for folder in control_groups("memory") if folder.is_dir()]
    if not parents:
        pytest.skip("there is no memory control group")
    folder = parents[0] / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group can be made: {error}")
    if not any((folder / limit).exists() for limit in LIMITS):
        folder.rmdir()
        pytest.skip("the control group of this process does not limit the memory of others")
    group = MemoryGroup(folder)
    try:
        yield group
    finally:
        group.remove()
