"""The session ids of an engine in shared memory that outlives it: its successor reports them as lost."""

from __future__ import annotations

import mmap
import os

from service.ipc.messages.sessions import DIGEST_BYTES
from service.ipc.shared_file import create_shared_file
from service.settings import Settings


def journal_records(settings: Settings) -> int:
    """Return the size of one engine's journal: every open session, and as many lost sessions that it still has to report."""
    return 2 * settings.max_sessions


class SessionJournal:
    """Shared memory with a fixed number of records of DIGEST_BYTES. An engine writes its sessions; its successor reads them."""

    def __init__(self, records: int, descriptor: int | None = None) -> None:
        """descriptor: the memory that this process inherited; None creates it."""
        size = records * DIGEST_BYTES
        self.records = records
        self.descriptor = create_shared_file("seqserve-journal", size) if descriptor is None else descriptor
        self._pages = mmap.mmap(self.descriptor, size)

    def read(self, record: int) -> bytes:
        return self._pages[record * DIGEST_BYTES : (record + 1) * DIGEST_BYTES]

    def write(self, record: int, digest: bytes) -> None:
        self._pages[record * DIGEST_BYTES : (record + 1) * DIGEST_BYTES] = digest

    def close(self) -> None:
        self._pages.close()
        os.close(self.descriptor)
