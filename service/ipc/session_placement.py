"""Which engine of a replica holds a session. Every process computes the same answer without asking. Pure."""

from __future__ import annotations

from hashlib import blake2b


def engine_of_session(session: str, engine_count: int) -> int:
    """Return the engine's number by rendezvous hashing: an added engine takes an even share of the sessions and moves no other."""
    if engine_count == 1:
        return 0
    return max(range(engine_count), key=lambda place: blake2b(f"{place} {session}".encode(), digest_size=8).digest())
