"""Which method answers a call, and for whom: everything that the fields of a call decide."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import grpc

from service.access.caller import ANYBODY, Caller
from service.access.scopes import Scope
from service.errors import ServiceError, Unauthorized, Unsupported
from service.frontend.grpc.infer import InferHead
from service.frontend.grpc.wire import (
    CONTENT_TYPE,
    CallEnded,
    CallStatus,
    error_status,
    http_refusal,
    timeout_seconds,
    trailers_only,
    window_bits,
)
from service.frontend.http2.header_blocks import RequestFields
from service.frontend.oip.protobuf import SERVICE
from service.frontend.rest.scopes import ADMIN_PORT_SCOPES, grpc_scope
from service.frontend.run.access_log import record
from service.frontend.run.frontend import Frontend
from service.frontend.run.origin import NO_ORIGIN, RequestOrigin
from service.frontend.run.session_header import SESSION_HEADER, header_session
from service.settings import OFF

INFER_PATH, STREAM_PATH = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"
_NO_METHOD = CallStatus(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
_SESSION_FIELD = SESSION_HEADER.encode()


class Method(NamedTuple):
    """A method of the server.

    handle: takes the request and its GrpcCall, or all requests if the method reads a stream. It returns the response, or None if it has
    written all responses itself.
    """

    handle: Callable[[Any, Any], Awaitable[bytes | memoryview | None]]
    reads_stream: bool = False
    writes_stream: bool = False


class Route(NamedTuple):
    """The path of the calls with the same fields.

    timeout_seconds: infinite without a deadline. window_bits: of compressed messages, 0 if the call has none. session: named by the
    metadata. infer: the head of a call of ModelInfer, without its deadline. refusal: the header block of the response to all of them, if
    there is one. denied: whether they are refused for their caller. delay: seconds that the refusal waits. generation: of the access
    policy that decided. origin: of all of them.
    """

    method: Method | None = None
    path: str = ""
    timeout_seconds: float = math.inf
    window_bits: int = 0
    scope: Scope = Scope.PUBLIC
    caller: Caller = ANYBODY
    session: str | None = None
    infer: InferHead | None = None
    refusal: bytes = b""
    denied: bool = False
    delay: float = 0.0
    generation: int = 0
    origin: RequestOrigin = NO_ORIGIN


class Router:
    """Finds the routes of calls."""

    def __init__(self, frontend: Frontend, methods: Mapping[str, Method]) -> None:
        """methods: by path."""
        self._frontend = frontend
        self._methods = methods

    def find(self, request: RequestFields, peer: str) -> Route:
        """Return the route of a call. peer: the address of its client."""
        route = Route(generation=self._frontend.access.policy.generation, origin=RequestOrigin.read(request.fields))
        if request.method != b"POST":
            return route._replace(refusal=http_refusal(405))
        content_type = request.get(b"content-type") or b""
        if not content_type.startswith(CONTENT_TYPE) or content_type[len(CONTENT_TYPE) :][:1] not in (b"", b"+", b";"):
            return route._replace(refusal=http_refusal(415))
        path = request.path.decode("latin-1")
        try:
            route = route._replace(path=path, window_bits=window_bits(request), timeout_seconds=timeout_seconds(request))
        except CallEnded as ended:
            return route._replace(refusal=trailers_only(ended.status))
        method, scope, caller = self._methods.get(path), grpc_scope(path), ANYBODY
        if method is None:
            return route._replace(refusal=trailers_only(_NO_METHOD))
        try:
            if scope is not Scope.PUBLIC:
                caller = self._identify(request)
                caller.require(scope)
            if scope in ADMIN_PORT_SCOPES and self._frontend.settings.admin_port != OFF:
                raise Unsupported("models are loaded and unloaded over HTTP, on the admin port of this service: use that port")
        except ServiceError as error:
            record(self._frontend, caller, scope, path, peer, error.code)
            guessed = isinstance(error, Unauthorized) and request.get(b"authorization") is not None
            delay = self._frontend.access.refused_keys.delay(peer) if guessed else 0.0
            return route._replace(refusal=trailers_only(error_status(error)), denied=True, delay=delay)
        session = None
        if path in (INFER_PATH, STREAM_PATH):
            try:
                named = [value.decode("latin-1") for name, value in request.fields if name == _SESSION_FIELD]
                session = header_session(named)
            except ServiceError as error:
                return route._replace(refusal=trailers_only(error_status(error)))
        infer = InferHead("", 0, {}, caller, session=session) if path == INFER_PATH else None
        return route._replace(method=method, scope=scope, caller=caller, session=session, infer=infer)

    def _identify(self, request: RequestFields) -> Caller:
        key, host = request.get(b"authorization"), request.authority.decode("latin-1")
        return self._frontend.access.policy.identify(host, None, None if key is None else key.decode("latin-1"))
