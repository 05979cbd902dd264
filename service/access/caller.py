"""The caller of a request, with its rights and its tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from service.access.scopes import OPEN_SCOPES, Scope
from service.errors import Forbidden
from service.ipc.messages.inference import NO_TENANT, Request, Share
from service.ipc.messages.sessions import session_of_tenant

MAX_PRIORITY = 10


class Quotas(NamedTuple):
    """How much a key may use over all frontends; 0 means no limit. bytes: of the values that engines receive."""

    requests_per_second: int = 0
    bytes_per_second: int = 0
    sequences_in_flight: int = 0


NO_QUOTAS = Quotas()


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    name: of its key, or how it was recognised. key: the id of its key, empty without keys. share: its tenant, empty without keys, and the
    tenant's weight. max_sessions: how many sessions its tenant may have open in one engine, 0 for no separate limit.
    """

    name: str
    share: Share
    scopes: frozenset[Scope]
    max_priority: int
    max_sessions: int = 0
    quotas: Quotas = NO_QUOTAS
    key: str = ""

    @property
    def is_limited(self) -> bool:
        """Whether its requests are counted."""
        return self.key != "" or self.quotas != NO_QUOTAS

    def require(self, scope: Scope) -> None:
        """Raise Forbidden unless the caller has the scope."""
        if scope in self.scopes:
            return
        if self is ANYBODY:
            raise Forbidden(
                f"{scope} is for local clients while the service has no keys: connect over 127.0.0.1 and name it as the host, "
                "or start the service with SEQSERVE_KEYS"
            )
        raise Forbidden(f"the key {self.name} does not have the scope {scope}: use another key")

    def session(self, id: str) -> str:
        """Return the name of a session in the engines, where sessions of other tenants may have the same id."""
        return session_of_tenant(self.share.tenant, id)

    def admit(self, request: Request) -> Request:
        """Return a request for the engines; raises Forbidden for a session or a priority that the caller may not use."""
        if request.priority > self.max_priority:
            raise Forbidden(
                f"the highest priority of {self.name} is {self.max_priority}: send a lower priority, or use another key",
                field="priority",
            )
        if request.session is not None and Scope.SESSION not in self.scopes:
            self.require(Scope.SESSION)
        if not self.share.tenant:
            return request
        if request.session is None:
            return structs.replace(request, share=self.share)
        session = self.session(request.session)
        return structs.replace(request, share=self.share, session=session, session_limit=self.max_sessions)


LOCAL = Caller("local", NO_TENANT, frozenset(Scope), MAX_PRIORITY)
"""A client on the same machine as a service without keys, or any client of an insecure service."""
ANYBODY = Caller("anybody", NO_TENANT, OPEN_SCOPES, 0)
"""Any other client of a service without keys, and every client that is not identified."""
