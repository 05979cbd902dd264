"""What the HTTP routes share: a body is read, a caller may leave, an answer or an error is written."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from service.errors import STATUS, InvalidRequest, ServiceError, TooLarge, UnsupportedMedia
from service.frontend.inference import CallerGone, Frontend
from service.frontend.rest import schemas

T = TypeVar("T")
BYTES = "application/octet-stream"
PACKED = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""Encodings of a body by their names, as zlib calls them."""
DISCARDED_BODIES = 4
"""A body over the limit is read and thrown away up to this many times the limit: who still sends cannot hear an answer."""


class Direct(APIRoute):
    """A route whose endpoint takes the request and gives the response, with nothing between them and the server."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


async def read_json(request: Request, frontend: Frontend) -> bytes:
    """The whole body, when its type, encoding and size are ones that are read here; it may not be JSON all the same."""
    media = _media(request)
    if media and media != "application/json" and not media.endswith("+json"):
        raise UnsupportedMedia("the content type is not JSON: send Content-Type: application/json, or none")
    return await _read(request, "SEQSERVE_MAX_BODY_BYTES", frontend.settings.max_body_bytes)


async def read_state(request: Request, frontend: Frontend) -> bytes:
    """The whole body, when its type, encoding and size may be those of a session's state."""
    if _media(request) not in ("", BYTES):
        raise UnsupportedMedia(f"the content type is not that of a state: send Content-Type: {BYTES}, or none")
    return await _read(request, "SEQSERVE_MAX_STATE_BYTES", frontend.settings.max_state_bytes)


async def read_tensors(request: Request, frontend: Frontend) -> bytes:
    """The whole body, unpacked when it is compressed, when its size is one that is read here. What it is its other headers say: clients of
    the Open Inference Protocol name no content type, or any."""
    encoding, limit = request.headers.get("content-encoding", "identity").lower(), frontend.settings.max_body_bytes
    if encoding not in ("identity", *PACKED):
        raise UnsupportedMedia("the content encoding is none that is read here: send gzip, deflate, or the body as it is")
    data = await _read(request, "SEQSERVE_MAX_BODY_BYTES", limit, packed=True)
    return _unpacked(data, PACKED[encoding], limit) if encoding in PACKED else data


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises CallerGone, with `work` cancelled, when the caller closes the connection first."""
    working, gone = asyncio.current_task(), False
    assert working is not None

    def stop(listening: asyncio.Future[None]) -> None:
        nonlocal gone
        if not listening.cancelled() and not ended:
            gone = True
            working.cancel()

    ended, listening = False, asyncio.ensure_future(_gone(request))
    listening.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if gone:
            working.uncancel()
            raise CallerGone from None
        raise
    finally:
        ended = True
        listening.cancel()


def written(frontend: Frontend, content: bytes, media: str = "application/json") -> Response:
    """A good answer; the last one on its connection when the service is about to end."""
    response = Response(content, media_type=media)
    if frontend.draining:
        response.headers["connection"] = "close"
    return response


def error(frontend: Frontend, fault: ServiceError, headers: dict[str, str] | None = None) -> Response:
    """The one body of every error, with the code of its kind."""
    response = Response(
        msgspec.json.encode(schemas.error_body(fault)), STATUS[type(fault)].http, headers, media_type="application/json"
    )
    if fault.retry_after is not None:
        response.headers["retry-after"] = str(fault.retry_after)
    if frontend.draining or isinstance(fault, TooLarge):
        response.headers["connection"] = "close"
    return response


def _media(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read(request: Request, knob: str, limit: int, *, packed: bool = False) -> bytes:
    if not packed and request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("the body is compressed: send it without Content-Encoding")
    parts, size = [], 0
    if _declared(request) > DISCARDED_BODIES * limit:
        raise _too_large(knob, limit)
    try:
        async for part in request.stream():
            size += len(part)
            if size > DISCARDED_BODIES * limit:
                break
            if size <= limit:
                parts.append(part)
            else:
                parts.clear()
    except ClientDisconnect:
        raise CallerGone from None
    if size > limit:
        raise _too_large(knob, limit)
    return b"".join(parts)


def _unpacked(data: bytes, window: int, limit: int) -> bytes:
    """What was compressed, of which no more than the limit is ever unpacked."""
    unpacker = zlib.decompressobj(window)
    try:
        whole = unpacker.decompress(data, limit + 1)
    except zlib.error as fault:
        raise InvalidRequest(f"the body is not compressed as Content-Encoding says: {fault}") from None
    if len(whole) > limit:
        raise _too_large("SEQSERVE_MAX_BODY_BYTES", limit)
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidRequest("the compressed body does not end where it should: send all of it, and nothing behind it")
    return whole


def _declared(request: Request) -> int:
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) <= 19):
        raise InvalidRequest("Content-Length is not a number of bytes")
    return int(length)


def _too_large(knob: str, limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {knob}, which is {limit} bytes: send less at once, or raise the limit")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
