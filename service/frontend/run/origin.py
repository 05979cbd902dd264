"""The identity of a request from its headers: its id, and the trace of its client. Pure; every byte here may be hostile.

The W3C recommendation Trace Context defines the trace headers. Baggage is not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from itertools import chain
from struct import Struct
from typing import NamedTuple, Protocol

REQUEST_ID, TRACEPARENT, TRACESTATE = b"x-request-id", b"traceparent", b"tracestate"
MAX_STATE_BYTES, MAX_STATE_MEMBERS = 512, 32
"""Size of a tracestate that is passed on. The recommendation asks for at least as much."""
IDS_AT_ONCE = 256
_IDS = Struct("32s" * IDS_AT_ONCE)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")
_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL
)
_MEMBER = re.compile(
    rb"(?:[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13}|[a-z][a-z0-9_*/-]{0,255})"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}"
)
_SAMPLED = 1
Header = tuple[bytes, bytes]


class RequestOrigin(NamedTuple):
    """The headers of a request that identify it, unchecked except `request_id`. An absent or repeated header is empty."""

    request_id: bytes = b""
    traceparent: bytes = b""
    tracestate: bytes = b""

    @classmethod
    def read(cls, headers: Iterable[Header]) -> RequestOrigin:
        """Return the origin of a request. headers: with names in lower case."""
        ids: list[bytes] = []
        parents: list[bytes] = []
        states: list[bytes] = []
        for name, value in headers:
            if name == REQUEST_ID:
                ids.append(value)
            elif name == TRACEPARENT:
                parents.append(value)
            elif name == TRACESTATE:
                states.append(value)
        if not (ids or parents):
            return NO_ORIGIN
        request_id = ids[0] if len(ids) == 1 and _REQUEST_ID.fullmatch(ids[0]) else b""
        return cls(request_id, parents[0] if len(parents) == 1 else b"", b",".join(states))


NO_ORIGIN = RequestOrigin()


class Parent(NamedTuple):
    """The span of a client in which it sent the request. trace, span: ids in hexadecimal digits."""

    trace: str
    span: str
    sampled: bool
    state: str


def parse_parent(origin: RequestOrigin) -> Parent | None:
    """Return the client's span, None without a valid traceparent. The fields of later versions that we do not know are ignored."""
    match = _TRACEPARENT.fullmatch(origin.traceparent)
    if match is None or (match[1] == b"00" and match[5] is not None):
        return None
    sampled = bool(int(match[4], 16) & _SAMPLED)
    return Parent(match[2].decode(), match[3].decode(), sampled, _valid_state(origin.tracestate))


def _valid_state(value: bytes) -> str:
    """Return a tracestate without its empty members, or nothing if it is not valid or too large."""
    members = [member for part in value.split(b",", MAX_STATE_MEMBERS + 1) if (member := part.strip(b" \t"))]
    state = b",".join(members)
    keys = {member.partition(b"=")[0] for member in members}
    valid = len(keys) == len(members) <= MAX_STATE_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return state.decode() if valid and len(state) <= MAX_STATE_BYTES else ""


class RequestIds:
    """Makes ids of 32 random hexadecimal digits, for requests without an id. take: returns a new id."""

    def __init__(self) -> None:
        self.take: Callable[[], bytes] = chain.from_iterable(iter(_new_ids, ())).__next__


def _new_ids() -> tuple[bytes, ...]:
    """Return many new ids, which cost one call of the system."""
    return _IDS.unpack(os.urandom(16 * IDS_AT_ONCE).hex().encode())


class Identity(Protocol):
    """A request, as its reply and the log name it. trace_headers: returned to the client, and set if the request is traced."""

    @property
    def origin(self) -> RequestOrigin: ...

    @property
    def request_id(self) -> bytes: ...

    trace_headers: tuple[Header, ...]


class RequestIdentity:
    """The identity of a request on the general path."""

    __slots__ = ("origin", "request_id", "trace_headers")

    def __init__(self, origin: RequestOrigin, ids: RequestIds) -> None:
        self.origin = origin
        self.request_id = origin.request_id or ids.take()
        self.trace_headers: tuple[Header, ...] = ()

    @property
    def headers(self) -> list[Header]:
        """Return the headers that identify the request in its reply."""
        return [(REQUEST_ID, self.request_id), *self.trace_headers]
