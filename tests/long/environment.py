"""Faults of a server's environment: a full disk, a library in C that all its processes load first, and a memory control group."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from service.control_groups import control_groups
from tests.serving import eventually


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


def compiled(source: str, folder: Path) -> Path:
    """Return the library that is compiled from a file in this folder. Skips the test without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler is missing")
    file = Path(__file__).with_name(source)
    library = folder / file.with_suffix(".so").name
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(file), "-ldl"], check=True)
    return library


# Memory control groups.

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
        self._procs = str(folder / "cgroup.procs")
        self._limit_bytes = 0

    @property
    def program(self) -> tuple[str, str]:
        """The arguments of Python that start the command line of the service in the group, with all its processes."""
        return "-c", PROGRAM.format(procs=self._procs)

    def limit_to(self, share: float) -> None:
        """Set the limit, so that this share of it is in use now."""
        self._limit_bytes = round(self._used_bytes / share)
        (self._folder / self._limit).write_text(str(self._limit_bytes))

    @contextmanager
    def ballast(self, share: float) -> Iterator[None]:
        """Let another process in the group fill it up to a share of the limit."""
        code = BALLAST.format(procs=self._procs, size=round(share * self._limit_bytes - self._used_bytes))
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            yield
            assert process.poll() is None, "the process was killed"
            process.communicate()

    def kills(self) -> int:
        """Return how many processes the kernel killed for want of memory."""
        events = self._folder / ("memory.events" if self._limit == "memory.max" else "memory.oom_control")
        return int(dict(line.split() for line in events.read_text().splitlines())["oom_kill"])

    @property
    def _used_bytes(self) -> int:
        return int((self._folder / LIMITS[self._limit]).read_text())

    def _removed(self) -> bool:
        with suppress(OSError):  # a process of it still ends
            self._folder.rmdir()
        return not self._folder.exists()


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
        eventually(group._removed)
