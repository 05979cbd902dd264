"""Shared by all HTTP routes: read the request body, notice that the client disconnects, write a reply or an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Message as AsgiMessage
from starlette.types import Scope as AsgiScope

from service.access.caller import Caller
from service.access.policy import BEARER
from service.access.scopes import Scope
from service.errors import STATUS, InvalidRequest, ServiceError, TooLarge, Unauthorized, UnsupportedMedia
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.guards.compression import WINDOW_BITS, NotCompressed, decompress
from service.frontend.rest.scopes import HTTP_SCOPES
from service.frontend.run.access_log import AuditEntry, audited
from service.frontend.run.exchange import AwaitedExchange, ClientDisconnected, HttpReply
from service.frontend.run.frontend import Frontend
from service.frontend.run.large_answers import MAX_JOINED_BYTES
from service.frontend.run.origin import Header, RequestIdentity, RequestIds, RequestOrigin
from service.frontend.run.runner import DecodedRequest, RequestRunner
from service.frontend.run.session_header import SESSION_HEADER, header_session

T = TypeVar("T")
JSON = "application/json"
OCTET_STREAM = "application/octet-stream"
SUBPROTOCOL = "seqserve"
"""Subprotocol of /stream, selected if the client offers it. A client that offers a key must offer this too."""
KEY_SUBPROTOCOL = "seqserve.key."
"""Prefix of a key that is offered as a subprotocol."""
IDENTITY = "seqserve.identity"
"""The key of a request's identity in its ASGI scope."""
BEGINNINGS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
"""The ASGI messages that have the headers of a reply."""
DISCARD_FACTOR = 4
"""A body over the limit is read and discarded up to this many times the limit: a client reads no reply while it still sends."""


class Limit(NamedTuple):
    """A limit on the size of a body in bytes, and the setting that raises it, if there is one."""

    size: int
    setting: str = ""

    def error(self) -> TooLarge:
        if not self.setting:
            return TooLarge(f"the body is larger than {self.size} bytes, the limit of this endpoint: send a smaller body")
        return TooLarge(
            f"the body is larger than {self.setting}, which is {self.size} bytes: send a smaller body, or raise {self.setting}"
        )


MANAGEMENT_LIMIT = Limit(MAX_LOOP_BODY_BYTES)
"""For requests without tensors, which are parsed on the event loop."""


def body_limit(frontend: Frontend) -> Limit:
    return Limit(frontend.settings.max_body_bytes, "SEQSERVE_MAX_BODY_BYTES")


class DirectRoute(APIRoute):
    """A FastAPI route that calls its endpoint with the request and sends the response, without FastAPI's validation and serialisation.

    It first checks that the caller has the scope of the route (`HTTP_SCOPES`), so no route is without a check. `get_route_handler` is
    FastAPI's documented hook for this. FastAPI still describes the route in the OpenAPI document.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        scopes = HTTP_SCOPES[self.path]

        async def handle(request: Request) -> Response:
            frontend: Frontend = request.app.state.frontend
            scope = scopes if isinstance(scopes, Scope) else scopes[request.method]
            action = f"{request.method} {request.url.path}"
            with audited(frontend, scope, action, peer_of(request)) as entry:
                await admit(frontend, request, scope, entry)
                request.state.caller = entry.caller
                return await endpoint(request)

        return handle


async def admit(frontend: Frontend, connection: HTTPConnection, scope: Scope, entry: AuditEntry) -> None:
    """Enter the caller of a request or a handshake; raises Forbidden or Unauthorized unless it has the scope."""
    if scope is Scope.PUBLIC:
        return
    entry.caller = await identify(frontend, connection)
    entry.caller.require(scope)


async def identify(frontend: Frontend, connection: HTTPConnection) -> Caller:
    """Return the caller of a request or a handshake; raises Forbidden or Unauthorized.

    After several wrong keys of the same address, Unauthorized comes late.
    """
    headers = connection.headers
    key = authorization_of(connection)
    try:
        return frontend.access.policy.identify(headers.get("host", ""), headers.get("origin"), key)
    except Unauthorized:
        if key is not None and (seconds := frontend.access.refused_keys.delay(peer_of(connection))):
            await asyncio.sleep(seconds)
        raise


def authorization_of(connection: HTTPConnection) -> str | None:
    """Return the Authorization header. A page in a browser cannot set one for a WebSocket, and names its key as a subprotocol."""
    header = connection.headers.get("authorization")
    if header is not None:
        return header
    keys = [name for name in connection.scope.get("subprotocols", ()) if name.startswith(KEY_SUBPROTOCOL)]
    return f"{BEARER}{keys[0].removeprefix(KEY_SUBPROTOCOL)}" if keys else None


def peer_of(connection: HTTPConnection) -> str:
    """Return the address of the client, empty if it is not known."""
    return "" if connection.client is None else connection.client.host


def identity_of(connection: HTTPConnection) -> RequestIdentity:
    """Return how the reply and the log name a request or a handshake."""
    identity: RequestIdentity = connection.scope[IDENTITY]
    return identity


class IdentifyingApp:
    """Wraps the ASGI application: every reply has the headers of its request's identity. It wraps only the sending side."""

    def __init__(self, app: ASGIApp, ids: RequestIds) -> None:
        self._app = app
        self._ids = ids

    @classmethod
    def around(cls, build: Callable[[], ASGIApp], ids: RequestIds) -> Callable[[], ASGIApp]:
        """Return a function that builds an application as `build` does, and wraps it."""
        return lambda: cls(build(), ids)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        identity = scope[IDENTITY] = RequestIdentity(RequestOrigin.read(scope["headers"]), self._ids)

        async def send_identified(message: AsgiMessage) -> None:
            if message["type"] in BEGINNINGS:
                message["headers"] = [*message.get("headers", ()), *identity.headers]
            await send(message)

        await self._app(scope, receive, send_identified)


def named_session(connection: HTTPConnection) -> str | None:
    """Return the session that the header of a request or a handshake names, or None; raises InvalidInput."""
    values = connection.headers.getlist(SESSION_HEADER)
    return header_session(values) if values else None


def caller_of(request: Request) -> Caller:
    """Return the caller of a request to a DirectRoute."""
    caller: Caller = request.state.caller
    return caller


async def read_json(request: Request, frontend: Frontend, limit: Limit | None = None) -> bytes:
    """Return the whole body after checks of its content type, encoding and size. The body may still not be JSON.

    limit: instead of SEQSERVE_MAX_BODY_BYTES.
    """
    media_type = _media_type(request)
    if media_type and media_type != JSON and not media_type.endswith("+json"):
        raise UnsupportedMedia("the content type is not JSON: send Content-Type: application/json, or none")
    return await _read(request, limit or body_limit(frontend))


async def read_state(request: Request, frontend: Frontend) -> bytes:
    """Return the whole body that should contain a session state, after checks of its content type, encoding and size."""
    if _media_type(request) not in ("", OCTET_STREAM):
        raise UnsupportedMedia(f"the content type is not that of a session state: send Content-Type: {OCTET_STREAM}, or none")
    return await _read(request, body_limit(frontend))


async def read_tensors(request: Request, frontend: Frontend, limit: Limit | None = None) -> bytes:
    """Return the whole body, decompressed, after checks of its encoding and size. limit: instead of SEQSERVE_MAX_BODY_BYTES.

    The content type is not checked: clients of the Open Inference Protocol send none, or any, and describe the body in other headers.
    """
    encoding, limit = request.headers.get("content-encoding", "identity").lower(), limit or body_limit(frontend)
    if encoding not in ("identity", *WINDOW_BITS):
        raise UnsupportedMedia("the content encoding is not supported: send gzip, deflate, or an uncompressed body")
    data = await _read(request, limit, compressed=True)
    if encoding not in WINDOW_BITS:
        return data
    try:
        body = await decompress(data, WINDOW_BITS[encoding], limit.size, frontend.limits.bodies)
    except NotCompressed as error:
        raise InvalidRequest(f"the body is not compressed as Content-Encoding says: {error}") from None
    if len(body) > limit.size:
        raise limit.error()
    return body


async def answer_request(
    frontend: Frontend,
    request: Request,
    runner: RequestRunner,
    read: Callable[[Request, Frontend], Awaitable[bytes]],
    decode: Callable[[bytes, AsyncExitStack], Awaitable[DecodedRequest]],
) -> Response:
    """Answer a request for inference. read: reads its body. decode: decodes the body; the stack is open until the request has its reply."""
    arrived, caller, exchange = time.monotonic(), caller_of(request), AwaitedExchange(identity_of(request))
    with runner.reading(exchange, arrived, caller):
        data = await read(request, frontend)

    async def run() -> HttpReply:
        async with AsyncExitStack() as stack:
            with runner.reading(exchange, arrived, caller):
                decoded = await decode(data, stack)
            return await runner.answer(decoded, exchange, arrived, caller)

    reply = await cancel_on_disconnect(request, run(), exchange)
    response = Response(reply.content)
    lines = (line.partition(b": ") for line in reply.headers.splitlines())
    response.raw_headers += [(name, value) for name, _, value in lines]
    if frontend.draining:
        response.headers["connection"] = "close"
    return response


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T], exchange: AwaitedExchange | None = None) -> T:
    """Return the result of `work`. Cancels it and raises ClientDisconnected when the client closes the connection first.

    exchange: of the request, if `work` runs it.
    """
    task, disconnected = asyncio.current_task(), False
    assert task is not None

    def cancel(watcher: asyncio.Future[None]) -> None:
        nonlocal disconnected
        if not watcher.cancelled() and not done:
            disconnected = True
            if exchange is not None:
                exchange.disconnected = True
            task.cancel()

    done, watcher = False, asyncio.ensure_future(_wait_for_disconnect(request))
    watcher.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if disconnected:
            task.uncancel()
            raise ClientDisconnected from None
        raise
    finally:
        done = True
        watcher.cancel()


def respond(frontend: Frontend, content: bytes | memoryview, media_type: str = JSON) -> Response:
    """Return a successful response; it closes the connection while the service shuts down."""
    response = Response(content, media_type=media_type)
    if frontend.draining:
        response.headers["connection"] = "close"
    return response


def respond_json(frontend: Frontend, value: Any) -> Response:
    """Return a successful response with this value as JSON."""
    return respond(frontend, msgspec.json.encode(value))


def respond_error(frontend: Frontend, error: ServiceError, headers: dict[str, str] | None = None) -> Response:
    """Return the response for an error. It closes the connection after a body that was not read to its end."""
    response = Response(error_body(error), STATUS[type(error)].http, headers, media_type=JSON)
    response.raw_headers += error_headers(error)
    if frontend.draining or isinstance(error, TooLarge):
        response.headers["connection"] = "close"
    return response


def error_headers(error: ServiceError) -> list[Header]:
    """Return the headers that only replies to some errors have."""
    headers = [] if error.retry_after is None else [(b"retry-after", b"%d" % error.retry_after)]
    return [*headers, (b"www-authenticate", b"Bearer")] if isinstance(error, Unauthorized) else headers


def error_body(error: ServiceError) -> bytes:
    """Return {"error", "code"} as JSON, with "field" when one field caused the error, and "steps" of a session where they matter."""
    body: dict[str, str | int] = {"error": error.message, "code": error.code}
    if error.field:
        body["field"] = error.field
    if error.steps is not None:
        body["steps"] = error.steps
    return msgspec.json.encode(body)


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read(request: Request, limit: Limit, *, compressed: bool = False) -> bytes:
    """Return the body; raises TooLarge above the limit, and UnsupportedMedia for an unexpected compression."""
    if not compressed and request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("the body is compressed: send it without Content-Encoding")
    parts, size = [], 0
    if _content_length(request) > DISCARD_FACTOR * limit.size:
        raise limit.error()
    try:
        async for part in request.stream():
            size += len(part)
            if size > DISCARD_FACTOR * limit.size:
                break
            if size <= limit.size:
                parts.append(part)
            else:
                parts.clear()
    except ClientDisconnect:
        raise ClientDisconnected from None
    if size > limit.size:
        raise limit.error()
    return b"".join(parts) if size <= MAX_JOINED_BYTES else await asyncio.to_thread(b"".join, parts)


def _content_length(request: Request) -> int:
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) <= 19):
        raise InvalidRequest("Content-Length is not a number of bytes: send the size of the body")
    return int(length)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
