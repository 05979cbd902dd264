"""POST /v2/models/NAME/infer on the hot path."""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache, partial
from typing import NamedTuple

from service.errors import ServiceError
from service.frontend import validation
from service.frontend.catalog import ServedModel
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.hot_calls import AnsweredCall, HotEndpoint, HttpReply, Parsed, RequestTally
from service.frontend.http_exchange import JSON, OCTET_STREAM
from service.frontend.inference import Frontend
from service.frontend.oip import json, parameters
from service.frontend.oip.binary_forms import MAX_FORM_BYTES, BinaryForm, BinaryForms, FormKey, all_finite
from service.frontend.oip.infer import build_request, build_response
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.json import HEADER_LENGTH, ParsedRequest
from service.frontend.oip.limits import max_loop_request_bytes
from service.frontend.oip.rest import MIN_COMPRESSED_BYTES, accepted_encoding, compress, encode_response, parse_infer
from service.frontend.request_heads import RequestHead
from service.ipc.messages import Api, Request

PATH = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()
_BINARY_HEADERS = f"content-type: {OCTET_STREAM}\r\n{HEADER_LENGTH.lower()}: %d\r\n".encode()
_accepted_encoding = lru_cache(maxsize=256)(accepted_encoding)


class _Context(NamedTuple):
    """A request, and the values that its reply needs. encoding: an encoding that the client accepts for the reply.

    key: of the form that the request has or may get; None without raw values, with long JSON, or in a session. With a form, the raw
    values are in `values`, and `parsed` and `tensors` have none.
    """

    parsed: ParsedRequest
    tensors: InputTensors
    encoding: str | None
    key: FormKey | None
    form: BinaryForm | None = None
    values: bytes | memoryview = b""


class HotOipInfer(HotEndpoint):
    """The endpoint."""

    api = Api.OIP

    def __init__(self, frontend: Frontend, tally: RequestTally) -> None:
        super().__init__(frontend, tally)
        self._forms = BinaryForms(frontend.catalog, frontend.settings)
        self._max_bytes = max_loop_request_bytes(frontend.settings)

    def accepts(self, head: RequestHead) -> bool:
        length = head.headers.get(_HEADER_LENGTH, b"")
        json_bytes = int(length) if length.isdigit() and len(length) <= 18 else head.length
        return head.length <= self._max_bytes and json_bytes <= MAX_LOOP_BODY_BYTES

    def parse(self, head: RequestHead, body: bytes) -> Parsed | None:
        path, length = _split(head.path), head.headers.get(_HEADER_LENGTH)
        if path is None or (length is not None and not (length.isdigit() and len(length) <= 18)):
            return None
        name, version = path
        json_length = None if length is None else int(length)
        key = (head.path, body[:json_length]) if json_length and json_length <= MAX_FORM_BYTES else None
        encoding = _accepted_encoding(head.headers.get(b"accept-encoding", b"").decode("latin-1"))
        form = self._forms.find(key) if key is not None and head.session is None else None
        if form is not None and form.fits(values := memoryview(body)[json_length:]):
            return Parsed(name, version or None, _Context(form.parsed, form.tensors, encoding, key, form, values))
        try:
            parsed = parse_infer(self.frontend, body, json_length, name, version)
            session = parameters.session_id(parsed.request.parameters, head.session)
            if session is not None and not validation.is_session_id(session):
                return None
            tensors = InputTensors(parsed.request.inputs)
            if tensors.text_bytes > MAX_LOOP_BODY_BYTES:
                return None
        except ServiceError:
            return None  # the general path raises it again, and counts the request
        return Parsed(name, version or None, _Context(parsed, tensors, encoding, key if session is None else None), session)

    def build(self, parsed: Parsed, model: ServedModel, arrived: float) -> tuple[Request, bytes | memoryview]:
        context: _Context = parsed.context
        form, tensors, settings = context.form, context.tensors, self.frontend.settings
        if form is not None:
            packed = form.pack(context.values)
            if packed is not None:
                return validation.engine_request(packed, form.options, model, arrived), packed.data
            tensors = form.decode(context.values)  # for the error that names the wrong value
        request, data = build_request(context.parsed.request, tensors, parsed.session, model, settings, arrived)
        if context.key is not None and not request.has_states:
            self._forms.remember(context.key, context.parsed, model, request.lengths)
        return request, data

    def write(self, model: ServedModel, answers: list[AnsweredCall]) -> list[HttpReply | ServiceError]:
        finite = all_finite([answered.data for answered in answers if _has_whole_response(answered)])
        return [(finite and _whole_reply(answered)) or _reply(model, answered) for answered in answers]

    async def write_large(self, model: ServedModel, answered: AnsweredCall) -> HttpReply:
        context: _Context = answered.call.parsed.context
        building = partial(build_response, context.parsed.request, context.tensors, model, answered.answer, answered.data)
        response = await asyncio.to_thread(building)
        return _with_headers(*await encode_response(self.frontend, response, context.parsed.raw), context.encoding)


@lru_cache(maxsize=1024)
def _split(path: str) -> tuple[str, str] | None:
    """Return the model and the version in a path; the version is empty if the path has none."""
    match = PATH.fullmatch(path)
    return None if match is None else (match[1], match[2] or "")


def _has_whole_response(answered: AnsweredCall) -> bool:
    form: BinaryForm | None = answered.call.parsed.context.form
    return form is not None and form.answered_by(answered.data)


def _whole_reply(answered: AnsweredCall) -> HttpReply | None:
    """Return the reply if it consists of the known JSON of its form and of the engine's answer as it is. The answer is finite."""
    context: _Context = answered.call.parsed.context
    if not _has_whole_response(answered):
        return None
    assert context.form is not None and context.form.response is not None
    content = context.form.response + answered.data
    if context.encoding is not None and len(content) >= MIN_COMPRESSED_BYTES:
        return None
    return HttpReply(content, _BINARY_HEADERS % len(context.form.response))


def _reply(model: ServedModel, answered: AnsweredCall) -> HttpReply | ServiceError:
    context: _Context = answered.call.parsed.context
    try:
        response = build_response(context.parsed.request, context.tensors, model, answered.answer, answered.data)
    except ServiceError as error:
        return error
    content, header_length = json.encode_response(response, context.parsed.raw)
    if context.form is not None and header_length is not None and context.form.response_size == len(answered.data):
        context.form.response = content[:header_length]
    return _with_headers(content, header_length, context.encoding)


def _with_headers(content: bytes, header_length: int | None, encoding: str | None) -> HttpReply:
    headers = f"content-type: {JSON}\r\n".encode() if header_length is None else _BINARY_HEADERS % header_length
    if encoding is None or len(content) < MIN_COMPRESSED_BYTES:
        return HttpReply(content, headers)
    return HttpReply(content, headers + f"content-encoding: {encoding}\r\n".encode(), partial(compress, encoding=encoding))
