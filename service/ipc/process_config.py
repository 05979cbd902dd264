"""What ties a child process to its supervisor: how it is born, how it shows that it lives, and that it does not outlive it."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import time
from typing import Any

import msgspec

from service.ipc.channel import Channel, Kind, encode
from service.ipc.messages import DIGEST_BYTES, Manifest
from service.settings import Settings

PR_SET_PDEATHSIG = 1
IDLE_SECONDS = 0.5
"""An idle process shows a sign of life this often."""
PATIENCE_SECONDS = 2.0
"""How long the next sign of life may take when nothing longer was announced."""
DEVICE_LOST = 70
"""Exit status of an engine whose device failed."""


class Birth(msgspec.Struct, frozen=True):
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
    pulse: int = -1
    journal: int = -1
    manifest: Manifest = Manifest([], {})
    strict: bool = True

    @classmethod
    def read(cls) -> Birth:
        """This process's own, once it is tied to its supervisor."""
        birth = msgspec.json.decode(sys.stdin.buffer.read(), type=cls)
        _die_with(birth.supervisor)
        return birth

    def read_settings(self) -> Settings:
        return Settings.model_validate_json(self.settings)

    def open_control(self) -> Channel:
        return Channel(socket.socket(fileno=self.control))


class Pulse:
    """One page of shared memory: the moment, on the machine's monotonic clock, by which the next sign of life is due.

    A page costs the engine nothing per turn, where a frame would cost a write and wake the supervisor.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("seqserve-pulse") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        # One store and one load: struct.pack_into writes zeros first, which the other side may read as long overdue.
        self._due = memoryview(self._page).cast("d")

    def beat(self, next_seconds: float = PATIENCE_SECONDS) -> None:
        """Alive now; the next beat comes within `next_seconds`."""
        self.beat_by(time.monotonic() + next_seconds)

    def beat_by(self, moment: float) -> None:
        """Alive until then at least, on the machine's monotonic clock."""
        self._due[0] = moment

    def late_seconds(self) -> float:
        """How long the next sign of life is overdue; negative while it is not."""
        return time.monotonic() - self._due[0]

    def close(self) -> None:
        self._due.release()
        self._page.close()
        os.close(self.descriptor)


def journal_records(settings: Settings) -> int:
    """Of one engine: for as many sessions as may be open, and as many again, of which it is told that they have ended."""
    return 2 * settings.max_sessions


class Journal:
    """Shared memory of so many records of DIGEST_BYTES, in which an engine notes its sessions; its successor reads them."""

    def __init__(self, records: int, descriptor: int | None = None) -> None:
        self.records = records
        self.descriptor = os.memfd_create("seqserve-journal") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, records * DIGEST_BYTES)
        self._pages = mmap.mmap(self.descriptor, records * DIGEST_BYTES)

    def read(self, record: int) -> bytes:
        return self._pages[record * DIGEST_BYTES : (record + 1) * DIGEST_BYTES]

    def write(self, record: int, digest: bytes) -> None:
        self._pages[record * DIGEST_BYTES : (record + 1) * DIGEST_BYTES] = digest

    def close(self) -> None:
        self._pages.close()
        os.close(self.descriptor)


def tell(control: Channel, kind: Kind, body: Any = None, id: int = 0) -> None:
    """One control frame, written now."""
    control.send(encode(kind, id, body))
    control.flush()


def _die_with(supervisor: int) -> None:
    """Have the kernel end this process when the supervisor ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        raise SystemExit("the supervisor has gone")
