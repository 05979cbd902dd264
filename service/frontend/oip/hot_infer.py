"""POST /v2/models/NAME/infer on the hot path: requests without a session."""

from __future__ import annotations

import re
from functools import lru_cache, partial
from typing import NamedTuple

from service.errors import ServiceError
from service.frontend.catalog import ServedModel
from service.frontend.hot_calls import AnsweredCall, HotEndpoint, Parsed, Reply
from service.frontend.http_exchange import JSON, OCTET_STREAM
from service.frontend.oip import json, parameters
from service.frontend.oip.infer import build_request, build_response
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.json import HEADER_LENGTH, ParsedRequest
from service.frontend.oip.rest import MIN_COMPRESSED_BYTES, accepted_encoding, compress, parse_infer
from service.frontend.request_heads import RequestHead
from service.ipc.messages import Request

PATH = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()
_accepted_encoding = lru_cache(maxsize=256)(accepted_encoding)


class _Context(NamedTuple):
    """What the reply needs of its request. encoding: an encoding that the client accepts for the reply."""

    parsed: ParsedRequest
    tensors: InputTensors
    encoding: str | None


class HotOipInfer(HotEndpoint):
    """The endpoint."""

    def parse(self, head: RequestHead, body: bytes) -> Parsed | None:
        path, length = PATH.fullmatch(head.path), head.headers.get(_HEADER_LENGTH)
        if path is None or (length is not None and not (length.isdigit() and len(length) <= 18)):
            return None
        name, version = path[1], path[2] or ""
        try:
            parsed = parse_infer(self.frontend, body, None if length is None else int(length), name, version)
            if parameters.session_id(parsed.request.parameters) is not None:
                return None
            tensors = InputTensors(parsed.request.inputs)
        except ServiceError:
            return None  # the general path raises it again, and counts the request
        encoding = _accepted_encoding(head.headers.get(b"accept-encoding", b"").decode("latin-1"))
        return Parsed(name, version or None, _Context(parsed, tensors, encoding))

    def build(self, parsed: Parsed, model: ServedModel, arrived: float) -> tuple[Request, bytes]:
        context: _Context = parsed.context
        return build_request(context.parsed.request, context.tensors, None, model, self.frontend.settings, arrived)

    def write(self, model: ServedModel, answers: list[AnsweredCall]) -> list[Reply | ServiceError]:
        return [_reply(model, answered) for answered in answers]


def _reply(model: ServedModel, answered: AnsweredCall) -> Reply | ServiceError:
    parsed, tensors, encoding = answered.call.context
    try:
        response = build_response(parsed.request, tensors, model, answered.answer, answered.data)
    except ServiceError as error:
        return error
    content, header_length = json.encode_response(response, parsed.raw)
    headers = f"content-type: {JSON if header_length is None else OCTET_STREAM}\r\n"
    if header_length is not None:
        headers += f"{HEADER_LENGTH.lower()}: {header_length}\r\n"
    if encoding is None or len(content) < MIN_COMPRESSED_BYTES:
        return Reply(content, headers.encode())
    return Reply(content, f"{headers}content-encoding: {encoding}\r\n".encode(), partial(compress, encoding=encoding))
