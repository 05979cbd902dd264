"""The start of a child process, the configuration that it receives, and its end when its parent ends."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from service.ipc.channel import Channel
from service.ipc.messages.models import Manifest
from service.ipc.shared_file import create_shared_file
from service.settings import Settings

PR_SET_PDEATHSIG = 1
MADV_COLLAPSE = 25
LARGEST_COLLAPSED_BYTES = 256 << 20
"""Larger mappings are tables. A request needs a few of their rows, and it would take long to move them."""
PARENT_CHECK_SECONDS = 0.1
DEVICE_LOST = 70
"""Exit status of an engine after a device failure."""


class ProcessConfig(msgspec.Struct, frozen=True):
    """The configuration that a child reads from standard input: settings as JSON, its parent's process id, and inherited descriptors.

    `place` is the child's number, counted from 0 in each role: an engine runs on the device with this number in the settings. `http`,
    `grpc` and `admin` are the listening sockets of a frontend, and `connections`, `quotas` and `suspects` are the files of its
    ConnectionCounts, QuotaCounts and SuspectTurns. `traces` is a frontend's or the tracer's end of the TraceSockets. `replica` is the id
    of this replica, a new one at each start of the service. `manifest` names the
    models to serve; with `strict`, a model that cannot be loaded fails the start. `is_restart` tells whether the service has been ready
    before.
    """

    parent: int
    settings: str
    control: int
    place: int = 0
    compute_threads: int = 1
    http: int = -1
    grpc: int = -1
    admin: int = -1
    connections: int = -1
    quotas: int = -1
    suspects: int = -1
    heartbeat: int = -1
    journal: int = -1
    traces: int = -1
    replica: str = ""
    manifest: Manifest = Manifest([], {})
    strict: bool = True
    is_restart: bool = False

    @classmethod
    def read(cls) -> ProcessConfig:
        """Return this process's configuration and bind its life to its parent's."""
        config = msgspec.json.decode(sys.stdin.buffer.read(), type=cls)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the supervisor drains
        _die_with(config.parent, config.control)
        return config

    def spawn(self, module: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start `python -m module` with this configuration, in a new process group: an interrupt from the keyboard reaches the
        supervisor alone. Raises OSError.
        """
        # A file, not a pipe: a large configuration would block the parent until the process has imported its modules.
        with os.fdopen(create_shared_file("seqserve-config"), "w+b") as config_file:
            config_file.write(msgspec.json.encode(self))
            config_file.seek(0)
            return subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=config_file,
                pass_fds=self.descriptors,
                env={**os.environ, **environment},
                process_group=0,
            )

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors that the child inherits."""
        inherited = (
            self.control,
            self.http,
            self.grpc,
            self.admin,
            self.connections,
            self.quotas,
            self.suspects,
            self.heartbeat,
            self.journal,
            self.traces,
        )
        return [descriptor for descriptor in inherited if descriptor >= 0]

    def read_settings(self) -> Settings:
        return Settings.model_validate_json(self.settings)

    def open_control(self) -> Channel:
        return Channel(socket.socket(fileno=self.control))


def freeze_heap() -> None:
    """Exempt every object that exists now from garbage collection.

    A full collection over models and imported modules would pause the process for 30 ms and more. Call it after the start and after each
    change of the models. A frozen object is still freed when its last reference disappears.
    """
    gc.collect()
    gc.freeze()
    # Collect again: otherwise the collector counts the frozen objects and lets the garbage of 100,000 requests pile up.
    gc.collect()


def use_huge_pages() -> None:
    """Move the heap to huge pages, where Linux can (from 6.1 on): after a pause, a request waits for each small page that it touches.

    This takes milliseconds for each huge page, in which other threads may run. Call it once, at the start.
    """
    try:
        mappings = Path("/proc/self/maps").read_text()
    except OSError:
        return  # only Linux has the file
    libc = ctypes.CDLL(None)
    for begin, end in re.findall(r"^(\w+)-(\w+) rw-p 00000000 00:00 0 *(?:\[heap\])?$", mappings, re.M):
        address, size = int(begin, 16), int(end, 16) - int(begin, 16)
        if size <= LARGEST_COLLAPSED_BYTES:
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_COLLAPSE)


def _die_with(parent: int, control: int) -> None:
    """End this process when its parent ends, however that happens."""
    if not _request_death_signal():
        threading.Thread(target=_exit_after, args=(parent, control), daemon=True).start()
    if os.getppid() != parent:
        raise SystemExit(1)


def _request_death_signal() -> bool:
    """Have the kernel kill this process when its parent ends; false where the kernel cannot."""
    if not sys.platform.startswith("linux"):
        return False
    result: int = ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return result == 0


def _exit_after(parent: int, control: int) -> None:
    """Exit when the parent has ended. A parent that only closes the control channel waits for this process to finish."""
    poll = select.poll()
    poll.register(control, 0)  # no event is requested: a hang-up is always reported
    poll.poll()
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)
