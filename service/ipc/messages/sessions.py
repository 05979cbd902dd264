"""The names of sessions, and a frontend's calls about one session."""

from __future__ import annotations

from service.ipc.messages.message import Message, Reply
from service.ipc.messages.models import ModelKey
from service.ipc.session_file import StateOrigin, StoredTensor

DIGEST_BYTES = 16
"""Size of a session id's digest in the session journal."""
RESERVED_SESSION_PREFIX = "stream:"
"""Session ids that the service creates begin with this; clients may not use it."""
TENANT_END = "\x1f"
"""Separates a tenant from the id of its session."""


def session_of_tenant(tenant: str, id: str) -> str:
    """Return the name of a session in the engines. tenant: empty in a service without keys."""
    return f"{tenant}{TENANT_END}{id}" if tenant else id


def session_tenant(name: str) -> str:
    """Return the tenant of a session, empty without keys."""
    return name.rpartition(TENANT_END)[0]


def session_id(name: str) -> str:
    """Return the id that a client gave to a session."""
    return name.partition(TENANT_END)[2] or name


class ExportSession(Message, frozen=True):
    """Call: return the state of a session in the reply's trailing bytes."""

    session: str


class ImportSession(Message, frozen=True):
    """Call: open a session with a state from `origin`. The bytes of its tensors are the trailing bytes."""

    session: str
    origin: StateOrigin
    tensors: dict[str, StoredTensor]
    session_limit: int = 0


class EndSession(Message, frozen=True):
    """Call: end a session."""

    session: str


class FindSession(Message, frozen=True):
    """Call: return the model version of a session. The reply is SessionFound."""

    session: str


class SessionFound(Reply, frozen=True):
    """Model version of a session; None when no such session is open."""

    key: ModelKey | None
