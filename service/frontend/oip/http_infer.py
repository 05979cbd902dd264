"""POST /v2/models/NAME/infer: its requests, and how their replies are encoded."""

from __future__ import annotations

import asyncio
import re
import zlib
from contextlib import AsyncExitStack
from functools import lru_cache, partial

import msgspec

from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.guards.decompression import WINDOW_BITS
from service.frontend.http1.request_heads import RequestHead
from service.frontend.oip import json, parameters
from service.frontend.oip.binary_forms import MAX_FORM_BYTES
from service.frontend.oip.inputs import InputTensors, text_bytes
from service.frontend.oip.json import HEADER_LENGTH, ParsedRequest
from service.frontend.oip.large_requests import DecodedInputs, RequestOptions
from service.frontend.oip.runner import TensorContext, TensorRunner, form_of
from service.frontend.oip.types import InferResponse
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


class HttpRunner(TensorRunner):
    """Runs the requests of HTTP."""

    api = Api.OIP

    def accepts(self, head: RequestHead) -> bool:
        length = head.headers.get(_HEADER_LENGTH, b"")
        json_bytes = int(length) if length.isdigit() and len(length) <= 18 else head.length
        return head.length <= self._max_bytes and json_bytes <= MAX_LOOP_BODY_BYTES

    def decode(self, head: RequestHead, body: bytes) -> DecodedRequest | None:
        path, length = _split(head.path), head.headers.get(_HEADER_LENGTH)
        if path is None or (length is not None and not (length.isdigit() and len(length) <= 18)):
            return None
        name, version = path
        json_length = None if length is None else int(length)
        key = (head.path, body[:json_length]) if json_length and json_length <= MAX_FORM_BYTES else None
        encoding = accepted_encoding(head.headers.get(b"accept-encoding", b"").decode("latin-1"))
        form = self._forms.find(key) if key is not None and head.session is None else None
        if form is not None and form.fits(values := memoryview(body)[json_length:]):
            context = TensorContext(form.parsed, form.tensors, encoding=encoding, key=key, form=form, values=values)
            return DecodedRequest(name, version or None, context)
        header = checked_header(head.session)
        parsed = self._parse(body, json_length, name, version)
        session = parameters.session_id(parsed.request.parameters, header)
        tensors = InputTensors(parsed.request.inputs)
        if tensors.text_bytes > MAX_LOOP_BODY_BYTES:
            return None
        return self.decoded(session, TensorContext(parsed, tensors, encoding=encoding, key=key if session is None else None))

    async def decode_slowly(
        self,
        data: bytes,
        json_length: int | None,
        model: tuple[str, str],
        session: str | None,
        encoding: str | None,
        stack: AsyncExitStack,
    ) -> DecodedRequest:
        """Return the request in a body of any size; raises a ServiceError.

        json_length: the value of HEADER_LENGTH, if the client sent it. model: name and version in the path. session: that the header names.
        stack: holds a large body, which the decoder has, until the request has its reply.
        """
        if min(len(data), len(data) if json_length is None else json_length) <= MAX_LOOP_BODY_BYTES:
            parsed = self._parse(data, json_length, *model)
            if json_length == 0 or text_bytes(parsed.request.inputs) <= MAX_LOOP_BODY_BYTES:
                tensors = InputTensors(parsed.request.inputs)
                return self._with_session(session, TensorContext(parsed, tensors, encoding=encoding))
        body = await stack.enter_async_context(self.frontend.decoder.decode(DecodeBody("oip_json", json_length, *model), data))
        options = msgspec.json.decode(body.options, type=RequestOptions)
        parsed = ParsedRequest(options.request(), options.raw)
        return self._with_session(session, TensorContext(parsed, DecodedInputs(options, body), encoding=encoding))

    def encode(self, response: InferResponse, context: TensorContext) -> HttpReply:
        content, header_length = json.encode_response(response, context.parsed.raw)
        if context.form is not None and header_length is not None:
            context.form.response = content[:header_length]
        return _reply(content, header_length, context.encoding)

    async def encode_large(self, response: InferResponse, context: TensorContext) -> HttpReply:
        if sum(tensor.value_count for tensor in response.outputs) <= PIECE_VALUES:
            return self.encode(response, context)
        pieces = await asyncio.to_thread(json.response_pieces, response, context.parsed.raw)
        header = await self.frontend.large_answers.join(pieces.json)
        if not pieces.tail:
            return _reply(header, None, context.encoding)
        content = await self.frontend.large_answers.join([header, *pieces.tail])
        return _reply(content, len(header), context.encoding)

    def has_whole_reply(self, call: RunningRequest) -> bool:
        form, context = form_of(call), call.decoded.context
        if form is None:
            return False
        assert form.response is not None
        return context.encoding is None or len(form.response) + len(call.data) < MIN_COMPRESSED_BYTES

    def whole_reply(self, model: ServedModel, call: RunningRequest) -> HttpReply:
        response: bytes = call.decoded.context.form.response
        return HttpReply(response + call.data, _BINARY_HEADERS % len(response))

    def _parse(self, body: bytes, json_length: int | None, name: str, version: str) -> ParsedRequest:
        if json_length == 0:
            return json.parse_raw_sequence(body, self.frontend.catalog.find(name, version or None).spec, name, version)
        return json.parse_request(body, json_length, name, version)

    def _with_session(self, header: str | None, context: TensorContext) -> DecodedRequest:
        return self.decoded(parameters.session_id(context.parsed.request.parameters, header), context)


@lru_cache(maxsize=256)
def accepted_encoding(header: str) -> str | None:
    """Return the first supported encoding in an Accept-Encoding header. `*` selects none."""
    for part in header.lower().split(","):
        name, _, quality = part.partition(";")
        if name.strip() in WINDOW_BITS and not re.fullmatch(r"\s*q=0(\.0*)?\s*", quality):
            return name.strip()
    return None


@lru_cache(maxsize=1024)
def _split(path: str) -> tuple[str, str] | None:
    """Return the model and the version in a path; the version is empty if the path has none."""
    match = PATH.fullmatch(path)
    return None if match is None else (match[1], match[2] or "")


def _reply(content: bytes | memoryview, header_length: int | None, encoding: str | None) -> HttpReply:
    """Return the reply with a body. header_length: the size of the JSON if raw bytes follow it."""
    headers = _JSON_HEADERS if header_length is None else _BINARY_HEADERS % header_length
    if encoding is None or len(content) < MIN_COMPRESSED_BYTES:
        return HttpReply(content, headers)
    return HttpReply(content, headers + f"content-encoding: {encoding}\r\n".encode(), partial(_compress, encoding=encoding))


def _compress(content: bytes | memoryview, encoding: str) -> bytes:
    """Return the content in a supported encoding, at the fastest level."""
    compressor = zlib.compressobj(1, wbits=WINDOW_BITS[encoding])
    return compressor.compress(content) + compressor.flush()
