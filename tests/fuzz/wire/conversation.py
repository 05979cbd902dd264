"""What one connection sends, and what is found about the bytes that it received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Judgement:
    """The replies on one connection by status, and what is wrong with them."""

    replies: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    """What came compressed: the fields of header blocks."""


def never(received: bytes) -> bool:
    """Return that the client waits for the end of the connection."""
    return False


@dataclass(frozen=True, slots=True)
class Conversation:
    """One connection.

    opening: what the client sends first; it waits for the head of the reply. data: what it sends then. judge: takes what it received.
    answered: returns whether the last request is answered, so that the client may close the connection; the default is that the service
    closes it.
    """

    data: bytes
    judge: Callable[[bytes], Judgement]
    answered: Callable[[bytes], bool] = never
    opening: bytes = b""
