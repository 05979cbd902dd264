"""The bytes that one connection sends, and the findings about the bytes that it received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Judgement:
    """The replies on one connection by status, and their faults."""

    replies: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    """The fields of header blocks, which came compressed."""


def never(received: bytes) -> bool:
    """Return that the client waits for the end of the connection."""
    return False


@dataclass(frozen=True, slots=True)
class Conversation:
    """One connection.

    opening: the first bytes of the client; it waits for the head of the reply. data: its later bytes. judge: takes the received bytes.
    answered: returns whether the last request is answered, so that the client may close the connection; the default is that the service
    closes it.
    """

    data: bytes
    judge: Callable[[bytes], Judgement]
    answered: Callable[[bytes], bool] = never
    opening: bytes = b""
