"""Where the state of a session is kept: every front finds the same engine, and none has to be told. Pure."""

from __future__ import annotations

from hashlib import blake2b


def home(session: str, places: int) -> int:
    """One of so many places, the one with the highest hash of both. One place more takes its even share of the sessions from all others,
    and moves no other session."""
    return max(range(places), key=lambda place: blake2b(f"{place} {session}".encode(), digest_size=8).digest())
