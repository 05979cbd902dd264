"""How many connections a frontend should accept now, compared with the other frontends."""

from __future__ import annotations

import math

from service.ipc.connection_counts import NOT_ACCEPTING

GROWTH = 4
"""In one round a frontend may accept one connection in addition to a GROWTH-th of the mean: equal frontends stay near each other."""


class ConnectionShare:
    """Compares the number of connections of this frontend on a port with the numbers of the others."""

    def __init__(self, numbers: memoryview[int], place: int) -> None:
        """numbers: of all frontends, in memory that they share. place: of this frontend."""
        self._numbers = numbers
        self._place = place

    def publish(self, connections: int) -> None:
        """Let the others know how many connections this frontend has."""
        self._numbers[self._place] = connections

    def withdraw(self) -> None:
        """Let the others know that this frontend accepts no connections now: they do not wait for it."""
        self._numbers[self._place] = NOT_ACCEPTING

    def excess(self) -> int:
        """Return how many connections this frontend has above the mean, rounded up, or 0."""
        return max(0, math.ceil(self._numbers[self._place] - self._accepting()[0]))

    def allowance(self) -> float:
        """Return how many connections this frontend may accept before it looks at the others again."""
        mean, frontends = self._accepting()
        if frontends == 1:
            return math.inf
        return 1 + mean // GROWTH + max(0, mean - self._numbers[self._place])

    def _accepting(self) -> tuple[float, int]:
        """Return the mean over all frontends that accept connections, this frontend included, and the number of these frontends."""
        numbers = self._numbers.tolist()
        closed = numbers.count(NOT_ACCEPTING)
        frontends = len(numbers) - closed
        return (sum(numbers) - closed * NOT_ACCEPTING) / frontends, frontends
