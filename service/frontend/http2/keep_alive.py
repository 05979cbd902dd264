"""The pings of a connection: those of this side find clients that have gone, and those of a client are limited."""

from __future__ import annotations

import math

from service.frontend.http2.frames import ACK, PING, ConnectionFault, ErrorCode, frame
from service.frontend.http2.limits import Limits
from service.frontend.http2.stream import Sender


class KeepAlive:
    """The pings of one connection. Times are those of the event loop."""

    def __init__(self, limits: Limits, sender: Sender, now: float) -> None:
        self._limits = limits
        self._sender = sender
        self._client_pinged, self._strikes = -math.inf, 0
        self._pinged = now
        self._unanswered = False
        """Whether the client has not replied to the last ping."""

    def reply(self, payload: bytes, now: float) -> None:
        """Reply to a ping of the client; raises ConnectionFault.

        Pings that come too early count, as with gRPC's own servers: frames of a response allow the next ping at any time.
        """
        if self._sender.wrote_content:
            self._sender.wrote_content = False
            self._strikes, self._client_pinged = 0, -math.inf
        allowed, self._client_pinged = self._client_pinged + self._limits.min_ping_seconds, now
        if allowed > now:
            self._strikes += 1
            if self._strikes > self._limits.max_ping_strikes:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._sender.write(frame(PING, ACK, 0, payload))

    def replied(self) -> None:
        """The client has replied to a ping."""
        self._unanswered = False

    def sweep(self, now: float, last_received: float, *, greeted: bool) -> bool:
        """Ping a client that sends nothing. Return whether it has gone.

        last_received: when bytes of the client arrived last. greeted: whether its SETTINGS have arrived.
        """
        limits = self._limits
        if self._unanswered and last_received < self._pinged and now - self._pinged > limits.ping_timeout_seconds:
            return True
        if now - max(last_received, self._pinged) > limits.ping_seconds and greeted:
            self._pinged, self._unanswered = now, True
            self._sender.write(frame(PING, 0, 0, b"are you?"))
        return False
