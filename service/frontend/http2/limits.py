"""Limits of a connection. A client that exceeds one gets GOAWAY with ENHANCE_YOUR_CALM, or its stream is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from service.frontend.guards.connection_guard import SEND_SECONDS
from service.frontend.guards.rate_budget import RateBudget


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may do."""

    max_streams: int = 1024
    """Concurrent streams; further calls wait in the client."""
    max_header_bytes: int = 16 << 10
    """Size of a header block, and of the decoded list."""
    ping_seconds: float = 60
    """How often this side pings a quiet connection."""
    ping_timeout_seconds: float = 20
    """How long this side waits for any reply to its ping before it closes the connection."""
    min_ping_seconds: float = 10
    """How often the client may ping while it receives nothing."""
    max_ping_strikes: int = 2
    """How many pings may come too early before this side closes the connection."""
    stall_seconds: float = SEND_SECONDS
    """How long one stream may wait for a window."""
    max_age_seconds: float = math.inf
    """When no further stream begins on a connection, infinite for none."""


@dataclass(slots=True)
class Budgets:
    """How often a client may send frames that are cheap to send but not to handle. Usual clients stay far below each limit."""

    control: RateBudget = field(default_factory=lambda: RateBudget(1000, 100))
    settings: RateBudget = field(default_factory=lambda: RateBudget(200, 20))
    resets: RateBudget = field(default_factory=lambda: RateBudget(1000, 200))
