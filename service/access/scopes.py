"""The rights of callers, in groups. Every endpoint belongs to exactly one scope."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Scope(StrEnum):
    """PUBLIC endpoints answer every client: load balancers check them. STATE is the export and import of sessions."""

    PUBLIC = "public"
    INFER = "infer"
    SESSION = "session"
    STATE = "state"
    ADMIN = "admin"
    METRICS = "metrics"
    DEBUG = "debug"


KEY_SCOPES = (Scope.INFER, Scope.SESSION, Scope.ADMIN, Scope.METRICS, Scope.DEBUG)
"""The scopes that a key may have. A key with SESSION may also export and import the sessions of its tenant."""
OPEN_SCOPES = frozenset((Scope.PUBLIC, Scope.INFER, Scope.SESSION, Scope.METRICS))
"""The rights of every client that reaches a service without keys."""
AUDITED = frozenset((Scope.ADMIN, Scope.DEBUG))
"""Every use of these scopes is logged."""


def with_implied(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """Return the scopes of a key and every scope that they include."""
    implied = {Scope.PUBLIC, *scopes}
    return frozenset(implied | {Scope.STATE} if Scope.SESSION in implied else implied)
