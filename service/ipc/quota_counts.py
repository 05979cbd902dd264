"""The use of keys with quotas, counted by all frontends in memory that they share."""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from hashlib import sha256
from typing import NamedTuple

from service.ipc.shared_file import create_shared_file

MAX_KEYS = 4096
"""Largest number of keys with quotas over the life of a service, revoked keys included."""
BYTES = 8


class _Field(IntEnum):
    """The counts of one key at one frontend. Requests and bytes belong to the second with the number SECOND, and to the second before."""

    IN_FLIGHT = 0
    SECOND = 1
    REQUESTS = 2
    REQUESTS_BEFORE = 3
    BYTES = 4
    BYTES_BEFORE = 5


_REGION = MAX_KEYS * len(_Field)
"""The numbers of one frontend. Before the first region are the digests of the keys' names, in the order of their slots."""


class Used(NamedTuple):
    """The use of a key: sequences in flight, and requests and bytes within the last second."""

    in_flight: int
    requests: float
    bytes: float


class QuotaCounts:
    """Each frontend writes its own numbers and reads the numbers of all frontends."""

    def __init__(self, numbers: memoryview[int], place: int, descriptor: int = -1) -> None:
        self.descriptor = descriptor
        self._numbers = numbers
        self._place = place

    @classmethod
    def create(cls, frontends: int) -> QuotaCounts:
        """Return the counts of frontends, in a new shared file. Raises OSError."""
        return cls.open(create_shared_file("seqserve-quotas", BYTES * (MAX_KEYS + frontends * _REGION)))

    @classmethod
    def open(cls, descriptor: int, place: int = 0) -> QuotaCounts:
        """Return the counts in a file that `create` made, in any process. place: of the frontend that counts with them."""
        return cls(memoryview(mmap.mmap(descriptor, 0)).cast("q"), place, descriptor)

    @classmethod
    def private(cls) -> QuotaCounts:
        """Return the counts of a single frontend, which no other process sees."""
        return cls(memoryview(bytearray(BYTES * (MAX_KEYS + _REGION))).cast("q"), 0)

    def remove(self, place: int) -> None:
        """Forget the numbers of a frontend that has ended."""
        begin = MAX_KEYS + place * _REGION
        self._numbers[begin : begin + _REGION] = memoryview(bytearray(BYTES * _REGION)).cast("q")

    def of_key(self, name: str) -> KeyUse:
        """Return the numbers of a key. Raises RuntimeError if MAX_KEYS others have been counted."""
        digest = int.from_bytes(sha256(name.encode()).digest()[:BYTES], "little", signed=True) or 1
        with self._locked():
            for slot in range(MAX_KEYS):
                if self._numbers[slot] == 0:
                    self._numbers[slot] = digest
                if self._numbers[slot] == digest:
                    return KeyUse(self._numbers, slot, self._place)
        raise RuntimeError(f"{MAX_KEYS} keys have been counted since the service started: restart it")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other frontends from choosing the same slot for another key."""
        if self.descriptor < 0:
            yield
            return
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)


class KeyUse:
    """The numbers of one key."""

    def __init__(self, numbers: memoryview[int], slot: int, place: int) -> None:
        """place: of the frontend that counts with this object."""
        self._numbers = numbers
        self._places = range(MAX_KEYS + slot * len(_Field), len(numbers), _REGION)
        self._own = self._places[place]

    def begin(self, sequences: int, size: int, now: float) -> None:
        """Count a request of `size` bytes that is sent to an engine now."""
        numbers, own, second = self._numbers, self._own, int(now)
        elapsed = second - numbers[own + _Field.SECOND]
        if elapsed:
            for current, before in ((_Field.REQUESTS, _Field.REQUESTS_BEFORE), (_Field.BYTES, _Field.BYTES_BEFORE)):
                numbers[own + before] = numbers[own + current] if elapsed == 1 else 0
                numbers[own + current] = 0
            numbers[own + _Field.SECOND] = second
        numbers[own + _Field.IN_FLIGHT] += sequences
        numbers[own + _Field.REQUESTS] += 1
        numbers[own + _Field.BYTES] += size

    def end(self, sequences: int) -> None:
        """Count sequences that are no longer in flight."""
        self._numbers[self._own + _Field.IN_FLIGHT] -= sequences

    def total(self, now: float) -> Used:
        """Return the use of the key over all frontends.

        The second before counts in proportion to its part within one second of now, as if its requests had come evenly.
        """
        second, numbers = int(now), self._numbers
        left = 1.0 - (now - second)
        in_flight, requests, size = 0, 0.0, 0.0
        for at in self._places:
            in_flight += numbers[at + _Field.IN_FLIGHT]
            elapsed = second - numbers[at + _Field.SECOND]
            if elapsed == 0:
                requests += numbers[at + _Field.REQUESTS] + left * numbers[at + _Field.REQUESTS_BEFORE]
                size += numbers[at + _Field.BYTES] + left * numbers[at + _Field.BYTES_BEFORE]
            elif elapsed == 1:
                requests += left * numbers[at + _Field.REQUESTS]
                size += left * numbers[at + _Field.BYTES]
        return Used(in_flight, requests, size)
