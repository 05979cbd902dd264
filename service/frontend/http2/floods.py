"""Remembers which addresses have flooded a connection, so that they gain nothing when they connect again.

The frames of a new connection from such an address wait for a while, and all its connections of this time share a small budget. Connections
that were open before the flood keep their own budgets: they may belong to other clients behind the same proxy. Each frontend remembers for
itself.
"""

from __future__ import annotations

from typing import NamedTuple

from service.access.address_group import address_group
from service.frontend.http2.budget import Budget

WINDOW_SECONDS = 10.0
"""How long an address is remembered after its last flood."""
HOLD_SECONDS = 1.0
"""How long new connections of the address wait after a flood before their frames are handled."""
RESETS, RESETS_PER_SECOND = 100, 20
"""Resets that all connections of a remembered address share: some milliseconds of work each second."""
MAX_ADDRESSES = 4096
"""Addresses that are remembered. The address with the oldest last flood is forgotten first."""


class Flooder(NamedTuple):
    """An address after a flood. held_until: when its new connections are read. resets: their budget."""

    seen: float
    held_until: float
    resets: Budget


class Floods:
    """The floods of one frontend. Times are seconds on the event loop's clock."""

    def __init__(self) -> None:
        self._flooders: dict[str, Flooder] = {}
        """By group of addresses, in the order of their last floods."""

    def record(self, peer: str, now: float) -> None:
        """Remember that a connection of this address has ended because of a flood."""
        group = address_group(peer)
        before = self._flooders.pop(group, None)
        budget = before.resets if before is not None else Budget(RESETS, RESETS_PER_SECOND)
        self._flooders[group] = Flooder(now, now + HOLD_SECONDS, budget)
        if len(self._flooders) > MAX_ADDRESSES:
            del self._flooders[next(iter(self._flooders))]

    def find(self, peer: str, now: float) -> Flooder | None:
        """Return the record of an address, None if there is none now."""
        if not self._flooders:
            return None
        group = address_group(peer)
        flooder = self._flooders.get(group)
        if flooder is not None and now - flooder.seen > WINDOW_SECONDS:
            del self._flooders[group]
            return None
        return flooder
