"""The audit: one log line for each use of administration, and for each request that is refused for its caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from service.access.caller import ANYBODY, Caller
from service.access.scopes import AUDITED, Scope
from service.errors import Forbidden, InferenceFailed, ServiceError, Unauthorized
from service.frontend.run.exchange import ClientDisconnected
from service.frontend.run.frontend import Frontend
from service.metrics import GONE, OK

MAX_ACTION_CHARACTERS = 200
"""Of a logged action: the path of a request may be long."""


@dataclass(slots=True)
class AuditEntry:
    """The sender of a request. caller: ANYBODY until it is known."""

    caller: Caller = ANYBODY


@contextmanager
def audited(frontend: Frontend, scope: Scope, action: str, peer: str) -> Iterator[AuditEntry]:
    """Log how the request in the block ended, if its scope is audited or its caller is refused. peer: the client's address."""
    entry, outcome = AuditEntry(), OK
    try:
        yield entry
    except ServiceError as error:
        outcome = error.code
        raise
    except ClientDisconnected:
        outcome = GONE
        raise
    except Exception:
        outcome = InferenceFailed.code
        raise
    finally:
        record(frontend, entry.caller, scope, action, peer, outcome)


def record(frontend: Frontend, caller: Caller, scope: Scope, action: str, peer: str, outcome: str) -> None:
    """Count a refused caller, and log the end of a request as `audited` does."""
    refused = outcome in (Unauthorized.code, Forbidden.code)
    if refused:
        frontend.metrics.denied.add(outcome)
    if refused or scope in AUDITED:
        values: dict[str, Any] = {
            "caller": caller.name,
            "peer": peer,
            "action": action[:MAX_ACTION_CHARACTERS],
            "outcome": outcome,
        }
        if refused:
            frontend.log.capped("info", "audit", **values)
        else:
            frontend.log.info("audit", **values)
