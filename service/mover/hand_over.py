"""The end of a replica: it gives its sessions to replicas that are ready, and says goodbye."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b

from service.ipc.messages import OfferSessions
from service.log import Log
from service.metrics import Metrics

POLL_SECONDS = 0.02
NO_TAKER_SECONDS = 5.0
"""How long it waits while no other replica takes sessions: probably the whole service ends."""
OFFER_SECONDS = 0.5
"""Interval at which sessions that no replica has taken are offered again."""
MAX_OFFER = 256
"""Sessions in one message."""


async def hand_over(
    seconds: float,
    sessions: Callable[[], Awaitable[list[str]]],
    ready: Callable[[], Sequence[str]],
    reachable: Callable[[], bool],
    offer: Callable[[str, OfferSessions], None],
    replica: str,
) -> tuple[int, int]:
    """Offer all sessions until they are taken, for up to `seconds`. Returns how many were taken, and how many are left.

    Replicas that end at the same time may send each other sessions until they know of it: these sessions are offered too.

    sessions: returns the names of the open sessions. ready: returns the replicas that take sessions. reachable: whether there is any other
    replica. replica: the id of this replica.
    """
    loop = asyncio.get_running_loop()
    held, until, offer_at = set(remaining := await sessions()), loop.time() + seconds, 0.0
    give_up_at = loop.time() + NO_TAKER_SECONDS
    while remaining and reachable() and loop.time() < min(until, give_up_at):
        takers = ready()
        if takers:
            give_up_at = loop.time() + NO_TAKER_SECONDS
        if takers and loop.time() >= offer_at:
            offer_at = loop.time() + OFFER_SECONDS
            for taker, names in shares(remaining, takers).items():
                for begin in range(0, len(names), MAX_OFFER):
                    offer(taker, OfferSessions(names[begin : begin + MAX_OFFER], replica))
        await asyncio.sleep(POLL_SECONDS)
        remaining = await sessions()
        held.update(remaining)
    return len(held) - len(remaining), len(remaining)


def shares(sessions: Sequence[str], replicas: Sequence[str]) -> dict[str, list[str]]:
    """Spread sessions over replicas by rendezvous hashing: a second offer goes to the same replica."""
    by_replica: dict[str, list[str]] = {}
    for session in sessions:
        chosen = max(replicas, key=lambda replica: blake2b(f"{replica} {session}".encode(), digest_size=8).digest())
        by_replica.setdefault(chosen, []).append(session)
    return by_replica


def report(taken: int, left: int, metrics: Metrics, log: Log) -> None:
    """Count and log the outcome."""
    metrics.sessions_not_handed_over.add(by=left)
    write = log.warning if left else log.info
    write("sessions handed over", sessions=taken, left=left)
