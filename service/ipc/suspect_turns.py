"""Which frontend may run a suspect in an engine: a request that may have ended the engine before."""

from __future__ import annotations

import fcntl

from service.ipc.shared_file import create_shared_file


class SuspectTurns:
    """Two locks for each engine, which are bytes of a file that all frontends share.

    The frontend that holds the first lock runs a suspect. The frontend that holds the second lock is next, so frontends take turns. The
    kernel frees the locks of a frontend that ends.
    """

    def __init__(self, descriptor: int) -> None:
        """descriptor: of a file that `create` made, in any process; -1 for a single frontend."""
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> SuspectTurns:
        """Return the turns of all frontends, in a new shared file. Raises OSError."""
        return cls(create_shared_file("seqserve-suspects"))

    def take(self, place: int) -> bool:
        """Return whether this frontend may run a suspect in an engine now. If not, the caller asks again later, or gives up its place."""
        if not self._lock(2 * place + 1) or not self._lock(2 * place):
            return False
        self._unlock(2 * place + 1)
        return True

    def give_back(self, place: int) -> None:
        """Note that no suspect of this frontend runs in an engine, or is next."""
        self._unlock(2 * place)
        self._unlock(2 * place + 1)

    def _lock(self, byte: int) -> bool:
        """Return whether this process holds a lock, which it may have held before."""
        if self.descriptor >= 0:
            try:
                fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):  # systems differ
                return False
        return True

    def _unlock(self, byte: int) -> None:
        if self.descriptor >= 0:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, byte)
