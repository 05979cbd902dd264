"""What the supervisor tells a child process at its start, and how a child is bound to its supervisor's life."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys

import msgspec

from service.ipc.channel import Channel
from service.ipc.messages import Manifest
from service.settings import Settings

PR_SET_PDEATHSIG = 1
DEVICE_LOST = 70
"""Exit status of an engine whose device failed."""


class ProcessConfig(msgspec.Struct, frozen=True):
    """What a child reads from its standard input: settings as JSON, its supervisor, and the descriptors that it inherited.

    `place` numbers those of its kind from 0: an engine runs on the device that has this place in the settings. `grpc` is the address on
    which a front takes gRPC. `manifest` says which models to serve, and `strict` that it cannot start without one of them.
    """

    supervisor: int
    settings: str
    control: int
    place: int = 0
    listening: int = -1
    grpc: str | None = None
    heartbeat: int = -1
    journal: int = -1
    manifest: Manifest = Manifest([], {})
    strict: bool = True

    @classmethod
    def read(cls) -> ProcessConfig:
        """This process's own, once it is tied to its supervisor."""
        process_config = msgspec.json.decode(sys.stdin.buffer.read(), type=cls)
        _die_with(process_config.supervisor)
        return process_config

    def read_settings(self) -> Settings:
        return Settings.model_validate_json(self.settings)

    def open_control(self) -> Channel:
        return Channel(socket.socket(fileno=self.control))


def freeze_startup_objects() -> None:
    """Exempt everything built so far from garbage collection: a full collection would pause the process for 30 ms and more."""
    gc.collect()
    gc.freeze()
    # Collect again: otherwise the collector counts the frozen objects and lets the garbage of 100,000 requests pile up.
    gc.collect()


def _die_with(supervisor: int) -> None:
    """Have the kernel end this process when the supervisor ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        raise SystemExit("the supervisor has gone")
