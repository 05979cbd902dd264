"""The ids of an engine's sessions in shared memory, which outlives the engine: its successor reports them as lost."""

from __future__ import annotations

import mmap
import os

from service.ipc.messages import DIGEST_BYTES
from service.settings import Settings


def journal_records(settings: Settings) -> int:
    """Of one engine: for as many sessions as may be open, and as many again, of which it is told that they have ended."""
    return 2 * settings.max_sessions


class SessionJournal:
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
