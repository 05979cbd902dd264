"""WebSockets and gRPC streams, which are open while the keys of the service change: they take over the new rights, or end."""

from __future__ import annotations

from typing import Protocol

from service.access.caller import Caller
from service.access.policy import AccessPolicy
from service.access.scopes import Scope
from service.errors import Forbidden, ServiceError, Unauthorized


class OpenStream(Protocol):
    """A stream that was opened by a caller with the scope."""

    caller: Caller
    scope: Scope

    def revoke(self, error: ServiceError) -> None:
        """End the stream: its caller has lost the right."""


class OpenStreams:
    """The open streams of a frontend."""

    def __init__(self, access: AccessPolicy) -> None:
        self._access = access
        self._streams: set[OpenStream] = set()

    def add(self, stream: OpenStream) -> None:
        self._streams.add(stream)

    def discard(self, stream: OpenStream) -> None:
        self._streams.discard(stream)

    def recheck(self) -> None:
        """Apply changed keys."""
        for stream in list(self._streams):
            try:
                stream.caller = self._checked(stream)
            except ServiceError as error:
                stream.revoke(error)

    def _checked(self, stream: OpenStream) -> Caller:
        """Return the caller of a stream with its present rights; raises Unauthorized or Forbidden."""
        caller = self._access.current(stream.caller)
        if caller is None:
            raise Unauthorized(f"the key {stream.caller.name} was revoked: connect with another key")
        caller.require(stream.scope)
        if caller.share.tenant != stream.caller.share.tenant:
            raise Forbidden(f"the key {caller.name} belongs to another tenant now: connect again")
        return caller
