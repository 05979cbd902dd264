"""The heads of HTTP requests that the hot path may answer, each parsed once and remembered by its exact bytes.

A client on a kept connection repeats its heads byte for byte, apart from Content-Length and from the headers that identify a request.
The lines of these headers are cut out, and the rest is remembered. Only llhttp interprets a head, as on the general path, so that both
paths agree where a request ends: a line is cut only if all its characters are plain.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import httptools

from service.access.caller import ANYBODY, Caller
from service.access.policy import AccessPolicy
from service.access.scopes import Scope
from service.errors import ServiceError, Unauthorized
from service.frontend.run.origin import NO_ORIGIN, REQUEST_ID, TRACEPARENT, TRACESTATE, Header, RequestOrigin
from service.frontend.run.session_header import SESSION_HEADER

MAX_HEADS = 512
MAX_HEAD_BYTES = 1024
"""Longer heads are parsed each time: one client must not fill the memory with heads that it never repeats."""
READ_HEADERS = (b"content-type", b"accept-encoding", b"inference-header-content-length")
"""The headers that endpoints of the hot path read."""
_SESSION = SESSION_HEADER.encode()
_LINE_STARTS = {b"\r\n%b:" % name: name for name in (REQUEST_ID, TRACEPARENT, TRACESTATE, _SESSION)}
"""Starts of the lines that differ from request to request, and the names of their headers. The session comes last."""
_VALUE = re.compile(rb"[ \t]*([!-~](?:[ -~]{0,510}[!-~])?)")
_UNUSUAL = frozenset((b"transfer-encoding", b"content-encoding", b"expect", b"te", b"trailer", b"origin", b"prefer"))
_CONNECTION_OPTIONS = frozenset((b"keep-alive", b"upgrade", b"http2-settings"))
"""Options of a connection that stays open. An upgrade is ignored, as HTTP allows: some clients offer one with every request."""
_FORWARDED = frozenset((b"x-forwarded-for", b"x-forwarded-proto"))
"""Headers of proxies, which name the client. uvicorn reads them on the general path."""


class KeyRefusal(NamedTuple):
    """Why a request is refused for its key: the message of an Unauthorized, and whether the request has a key."""

    message: str
    has_key: bool


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A head that the hot path may answer. `length` is the size of the body in bytes, `caller` the sender of the request.

    `headers` has the headers of the request that are in READ_HEADERS, with lower-case names: a remembered head should be small.
    `session` is the value of x-session-id, unchecked. `refusal` is None for a caller that may use inference.
    """

    path: str
    length: int
    headers: Mapping[bytes, bytes]
    caller: Caller
    origin: RequestOrigin = NO_ORIGIN
    session: str | None = None
    refusal: KeyRefusal | None = None


class RequestHeads:
    """Parses heads and remembers the result."""

    def __init__(self, max_headers: int, access: AccessPolicy) -> None:
        """max_headers: the general path refuses a request with more."""
        self._max_headers = max_headers
        self._access = access
        self._known: dict[bytes, RequestHead | None] = {}
        self._rests: dict[bytes, RequestHead | None] = {}
        """Heads without the lines that identify a request."""

    def find(self, head: bytes) -> RequestHead | None:
        """Return the parsed head, or None if the general path must answer the request. head: with its empty line."""
        try:
            return self._known[head]
        except KeyError:
            pass
        identified = _cut(head)
        if identified is not None:
            return self._find_rest(*identified)
        parsed = self._parse(head, self._max_headers)
        _remember(self._known, head, parsed)
        return parsed

    def _find_rest(self, rest: bytes, identifying: list[Header]) -> RequestHead | None:
        """Return the parsed head. rest: the head without the lines of the headers that identify it."""
        try:
            known = self._rests[rest]
        except KeyError:
            known = self._parse(rest, self._max_headers - len(_LINE_STARTS))
            _remember(self._rests, rest, known)
        if known is None or known.origin is not NO_ORIGIN or known.session is not None:
            return None
        name, value = identifying[-1]
        session = value.decode("latin-1") if name is _SESSION else None
        origin = RequestOrigin.read(identifying)
        return RequestHead(known.path, known.length, known.headers, known.caller, origin, session, known.refusal)

    def forget(self) -> None:
        """Forget all parsed heads: the keys have changed."""
        self._known.clear()
        self._rests.clear()

    def _parse(self, head: bytes, max_headers: int) -> RequestHead | None:
        parsed = _parse(head, max_headers)
        if parsed is None:
            return None
        path, headers = parsed
        length, origin, key = (
            int(headers[b"content-length"]),
            RequestOrigin.read(headers.items()),
            _text(headers.get(b"authorization")),
        )
        try:
            caller = self._access.identify(headers[b"host"].decode("latin-1"), None, key)
            caller.require(Scope.INFER)
        except Unauthorized as error:
            if _FORWARDED & headers.keys():
                return None
            return RequestHead(path, length, {}, ANYBODY, origin, refusal=KeyRefusal(error.message, key is not None))
        except ServiceError:
            return None  # the general path raises it again
        kept = {name: headers[name] for name in READ_HEADERS if name in headers}
        return RequestHead(sys.intern(path), length, kept, caller, origin, _text(headers.get(_SESSION)) or None)


def _cut(head: bytes) -> tuple[bytes, list[Header]] | None:
    """Return the head without the lines of the headers that identify it, and these headers. None if their lines are unusual."""
    lower = head.lower()
    headers: list[Header] = []
    cuts: list[tuple[int, int]] = []
    for start, name in _LINE_STARTS.items():
        at = lower.find(start)
        if at > 0:
            end = head.find(b"\r\n", at + len(start))
            value = _VALUE.fullmatch(head, at + len(start), end)
            if value is None or lower.find(start, end) >= 0:
                return None
            headers.append((name, value[1]))
            cuts.append((at, end))
    if not cuts:
        return None
    for at, end in sorted(cuts, reverse=True):
        head = head[:at] + head[end:]
    return head, headers


def _remember(heads: dict[bytes, RequestHead | None], head: bytes, parsed: RequestHead | None) -> None:
    """Remember a head, unless it is refused: guessed keys would displace the heads of valid clients."""
    refused = parsed is not None and parsed.refusal is not None
    if len(head) <= MAX_HEAD_BYTES and not refused:
        if len(heads) >= MAX_HEADS:
            heads.clear()
        heads[head] = parsed


class _Reader:
    """Collects what llhttp reports about one head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.ends_early = False

    def on_message_begin(self) -> None:
        self.ends_early = self.complete

    def on_url(self, part: bytes) -> None:
        self.url += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True

    def on_body(self, part: bytes) -> None:
        self.ends_early = True


def _parse(head: bytes, max_headers: int) -> tuple[str, dict[bytes, bytes]] | None:
    """Return the path and the headers of a usual request, None for any other."""
    reader = _Reader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError:
        return None
    headers = dict(reader.headers)
    if not reader.complete or reader.ends_early or parser.get_method() != b"POST" or parser.get_http_version() != "1.1":
        return None
    if _UNUSUAL & headers.keys() or len(headers) != len(reader.headers) or not headers.get(b"host"):
        return None
    if len(headers) > max_headers:
        return None
    length = headers.get(b"content-length", b"")
    options = {option.strip() for option in headers.get(b"connection", b"keep-alive").lower().split(b",")}
    if not (length.isdigit() and len(length) <= 10) or not options <= _CONNECTION_OPTIONS:
        return None
    path = reader.url.decode("latin-1")
    if not path.startswith("/") or not path.isascii() or not set(path).isdisjoint("%?#"):
        return None
    return path, headers


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
