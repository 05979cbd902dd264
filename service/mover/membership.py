"""Which other replicas there are: reachable, known but silent, or ended. Pure: the time is an argument.

A replica has ended only if that is certain: its address refuses connections, another process answers there, the address is no longer
listed, or the replica has said so. Otherwise, as with a machine that does not answer, it may come back with its sessions.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import Enum

from service.mover.addresses import Address

MAX_GONE = 4096
UNLISTED_SECONDS = 15.0
"""How long a replica without a listed address may be missing: the list of addresses may be late."""


class Spot(Enum):
    """The knowledge about an address."""

    UNKNOWN = "unknown"
    REFUSES = "refuses"
    SELF = "self"
    CONNECTED = "connected"


class Membership:
    """The other replicas of one service."""

    def __init__(self) -> None:
        self._listed: dict[Address, Spot] | None = None
        self._at: dict[Address, str] = {}
        """The last replica at each address."""
        self._links: Counter[str] = Counter()
        self._missing: dict[str, float] = {}
        """Replicas without a connection, and the time since when."""
        self._gone: OrderedDict[str, None] = OrderedDict()

    def listed(self, addresses: set[Address], now: float) -> None:
        """Take over the present list of addresses."""
        before = self._listed or {}
        self._listed = {address: before.get(address, Spot.UNKNOWN) for address in addresses}
        for address in before.keys() - addresses:
            self._left(address, now)

    def found(self, address: Address, spot: Spot, replica: str = "") -> None:
        """Note the state of an address. replica: with CONNECTED."""
        if self._listed is None or address not in self._listed:
            return
        self._listed[address] = spot
        if spot is Spot.UNKNOWN:
            return
        last = self._at.pop(address, "")
        if last and last != replica and not self._is_elsewhere(last):
            self._end(last)
        if spot is Spot.CONNECTED:
            self._at[address] = replica

    def connected(self, replica: str) -> None:
        """Note an open connection to a replica, whichever side opened it."""
        self._links[replica] += 1
        self._missing.pop(replica, None)

    def disconnected(self, replica: str, now: float) -> None:
        """Note the end of a connection to a replica."""
        self._links[replica] -= 1
        if not self._links[replica]:
            del self._links[replica]
            if replica not in self._gone:
                self._missing[replica] = now

    def said_goodbye(self, replica: str) -> None:
        """Note that a replica holds no session any more, and ends."""
        self._end(replica)

    def tick(self, now: float) -> None:
        """Give up the replicas that have been missing for too long and are not listed."""
        here = set(self._at.values())
        for replica, since in list(self._missing.items()):
            if replica not in here and now - since > UNLISTED_SECONDS:
                self._end(replica)

    @property
    def reachable(self) -> set[str]:
        """Return the replicas with an open connection."""
        return set(self._links) - self._gone.keys()

    @property
    def known(self) -> set[str]:
        """Return the replicas that may hold sessions."""
        return self.reachable | self._missing.keys()

    @property
    def gone(self) -> set[str]:
        """Return the replicas that have ended."""
        return set(self._gone)

    @property
    def complete(self) -> bool:
        """Whether the present or the last replica is known for every listed address."""
        listed = self._listed
        return listed is not None and all(spot is not Spot.UNKNOWN or address in self._at for address, spot in listed.items())

    def _left(self, address: Address, now: float) -> None:
        """Drop an address that is no longer listed. A replica that still answers stays."""
        last = self._at.pop(address, "")
        if last and last not in self._links and last not in self._at.values():
            self._end(last)

    def _is_elsewhere(self, replica: str) -> bool:
        """Return whether a replica answers at another of its addresses."""
        return replica in self._at.values() and replica in self._links

    def _end(self, replica: str) -> None:
        self._missing.pop(replica, None)
        self._gone[replica] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
