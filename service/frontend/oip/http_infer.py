"""POST /v2/models/NAME/infer: its requests, and how their replies are encoded."""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import AsyncExitStack
from functools import lru_cache, partial
from typing import NamedTuple

from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.guards.compression import WINDOW_BITS, compress
from service.frontend.http1.request_heads import RequestHead
from service.frontend.oip import json
from service.frontend.oip.json import HEADER_LENGTH
from service.frontend.oip.limits import MAX_LOOP_TENSOR_BYTES
from service.frontend.oip.runner import TensorContext, TensorRunner
from service.frontend.oip.templates import MAX_HEAD_BYTES
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.rest.http_exchange import JSON, OCTET_STREAM
from service.frontend.run.catalog import ServedModel
from service.frontend.run.exchange import HttpReply
from service.frontend.run.large_answers import PIECE_VALUES
from service.frontend.run.runner import DecodedRequest, RunningRequest
from service.frontend.run.session_header import checked_header
from service.ipc.messages.decoder import DecodeBody
from service.ipc.messages.tracing import Api

PATH = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
MIN_COMPRESSED_BYTES = 1024
"""Smaller responses are not compressed: they would not shrink enough."""
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()
_BINARY_HEADERS = f"content-type: {OCTET_STREAM}\r\n{HEADER_LENGTH.lower()}: %d\r\n".encode()
_JSON_HEADERS = f"content-type: {JSON}\r\n".encode()


class HttpCall(NamedTuple):
    """What path and headers tell of a request. version: empty for the newest. json_bytes: size of the JSON if the client sent it."""

    path: str
    model: str
    version: str
    json_bytes: int | None
    encoding: str | None


class HttpRunner(TensorRunner):
    """Runs the requests of HTTP."""

    api = Api.OIP

    def accepts(self, head: RequestHead) -> bool:
        length = head.headers.get(_HEADER_LENGTH, b"")
        json_bytes = int(length) if length.isdigit() and len(length) <= 18 else head.length
        limit = min(MAX_LOOP_BODY_BYTES + MAX_LOOP_TENSOR_BYTES, self.frontend.settings.max_body_bytes)
        return head.length <= limit and json_bytes <= MAX_LOOP_BODY_BYTES

    def decode(self, head: RequestHead, body: bytes) -> DecodedRequest | None:
        call = _call(head.path, head.headers.get(_HEADER_LENGTH), head.headers.get(b"accept-encoding", b""))
        return None if call is None else self._read(call, body, head.session and checked_header(head.session))

    async def decode_slowly(self, call: HttpCall, data: bytes, session: str | None, stack: AsyncExitStack) -> DecodedRequest:
        """Return the request in a body of any size; raises a ServiceError.

        session: that the header names. stack: holds a large body, which the decoder has, until the request has its reply.
        """
        decoded = self._read(call, data, session)
        if decoded is not None:
            return decoded
        body = DecodeBody("oip_json", call.json_bytes, call.model, call.version)
        return await self.decode_large(body, data, session, stack, math.inf, call.encoding)

    def encode(self, response: InferResponse, context: TensorContext) -> HttpReply:
        return _reply(*json.encode_response(response, context.request.is_raw), context.encoding)

    async def encode_large(self, response: InferResponse, context: TensorContext) -> HttpReply:
        if sum(tensor.value_count for tensor in response.outputs) <= PIECE_VALUES:
            return self.encode(response, context)
        pieces = await asyncio.to_thread(json.response_pieces, response, context.request.is_raw)
        header = await self.frontend.large_answers.join(pieces.json)
        if not pieces.tail:
            return _reply(header, None, context.encoding)
        content = await self.frontend.large_answers.join([header, *pieces.tail])
        return _reply(content, len(header), context.encoding)

    def encode_start(self, model: ServedModel, request: InferRequest) -> bytes:
        return b""

    def encode_whole(self, response: bytes, call: RunningRequest, context: TensorContext) -> HttpReply | None:
        if context.encoding is not None and len(response) + len(call.data) >= MIN_COMPRESSED_BYTES:
            return None
        return HttpReply(response + call.data, _BINARY_HEADERS % len(response))

    def _read(self, call: HttpCall, body: bytes, session: str | None) -> DecodedRequest | None:
        """Return the request in a body, or None for a body that the decoder reads; raises a ServiceError."""
        name, version, json_bytes, encoding = call.model, call.version, call.json_bytes, call.encoding
        key = None
        if json_bytes and json_bytes <= MAX_HEAD_BYTES and session is None:
            key = call.path, body[:json_bytes]
            template = self.templates.find(key)
            if template is not None and template.fits(values := memoryview(body)[json_bytes:]):
                context = TensorContext(template.request, None, math.inf, encoding, key, template, values)
                return DecodedRequest(name, version or None, context)
        if json_bytes == 0:
            model = self.frontend.catalog.find(name, version or None)
            request, inputs = json.parse_raw_sequence(body, model.spec, name, version)
            context = TensorContext(request, inputs, encoding=encoding)
            return self.with_session(session, context, self.slow_packer(inputs))
        if min(len(body), json_bytes or len(body)) > MAX_LOOP_BODY_BYTES:
            return None
        request, inputs = json.parse_request(body, json_bytes, name, version)
        return self.decoded(session, TensorContext(request, inputs, math.inf, encoding, None if request.id else key))


@lru_cache(maxsize=256)
def accepted_encoding(header: str) -> str | None:
    """Return the first supported encoding in an Accept-Encoding header. `*` selects none."""
    for part in header.lower().split(","):
        name, _, quality = part.partition(";")
        if name.strip() in WINDOW_BITS and not re.fullmatch(r"\s*q=0(\.0*)?\s*", quality):
            return name.strip()
    return None


@lru_cache(maxsize=1024)
def _call(path: str, header_length: bytes | None, accepted: bytes) -> HttpCall | None:
    """Return what path and headers tell of a request, None for a request that the general path refuses."""
    match = PATH.fullmatch(path)
    if match is None or (header_length is not None and not (header_length.isdigit() and len(header_length) <= 18)):
        return None
    json_bytes = None if header_length is None else int(header_length)
    return HttpCall(path, match[1], match[2] or "", json_bytes, accepted_encoding(accepted.decode("latin-1")))


def _reply(content: bytes | memoryview, header_length: int | None, encoding: str | None) -> HttpReply:
    """Return the reply with a body. header_length: the size of the JSON if raw bytes follow it."""
    headers = _JSON_HEADERS if header_length is None else _BINARY_HEADERS % header_length
    if encoding is None or len(content) < MIN_COMPRESSED_BYTES:
        return HttpReply(content, headers)
    return HttpReply(content, headers + f"content-encoding: {encoding}\r\n".encode(), partial(compress, encoding=encoding))
