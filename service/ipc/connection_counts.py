"""The numbers of open connections of all frontends, in memory that they share."""

from __future__ import annotations

import mmap
from enum import IntEnum

from service.ipc.shared_file import create_shared_file

NOT_ACCEPTING = -1
"""The number of a frontend that accepts no connections."""
BYTES = 8


class Port(IntEnum):
    """The ports on which frontends accept connections."""

    HTTP = 0
    GRPC = 1
    ADMIN = 2


class ConnectionCounts:
    """One number for each port and frontend. Each frontend writes its own numbers and reads all numbers.

    A frontend needs the numbers whenever a connection arrives: messages would be late.
    """

    def __init__(self, descriptor: int) -> None:
        """descriptor: of a file that `create` returned, in any process."""
        self.descriptor = descriptor
        self._numbers = memoryview(mmap.mmap(descriptor, 0)).cast("q")

    @classmethod
    def create(cls, frontends: int) -> ConnectionCounts:
        """Return the numbers of frontends that do not accept connections yet. Raises OSError."""
        size = frontends * len(Port) * BYTES
        counts = cls(create_shared_file("seqserve-connections", size))
        for place in range(frontends):
            counts.remove(place)
        return counts

    def on_port(self, port: Port) -> memoryview[int]:
        """Return the numbers of all frontends on a port, which change when they change."""
        frontends = len(self._numbers) // len(Port)
        return self._numbers[port * frontends : (port + 1) * frontends]

    def remove(self, place: int) -> None:
        """Record that a frontend does not accept connections."""
        for port in Port:
            self.on_port(port)[place] = NOT_ACCEPTING
