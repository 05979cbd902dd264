"""POST /infer on the hot path: requests without a session."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from service.errors import ServiceError
from service.frontend import validation
from service.frontend.catalog import ServedModel
from service.frontend.head_outputs import input_field
from service.frontend.hot_calls import Answered, HotEndpoint, Parsed, Reply
from service.frontend.http_exchange import JSON
from service.frontend.request_heads import RequestHead
from service.frontend.rest.infer import check_returns, write_reply
from service.ipc.messages import Request

MAX_BODY_BYTES = 1 << 16
"""Larger bodies take the general path."""
_JSON_TYPES = (None, JSON.encode(), b"application/json; charset=utf-8", b"application/json;charset=utf-8")
_HEADERS = b"content-type: " + JSON.encode() + b"\r\n"


class OneShotBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The fields of an InferBody without a session. A body that does not decode takes the general path, which explains why."""

    model: str
    inputs: Annotated[list[Any], msgspec.Meta(min_length=1)]
    version: str | int | None = None
    returns: list[Literal["embedding", "sequence"]] = msgspec.field(default=[], name="return")
    deadline_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-10, le=10)] = 0


_decode = msgspec.json.Decoder(OneShotBody).decode


class HotInfer(HotEndpoint):
    """The endpoint. The context of a call is its body."""

    def parse(self, head: RequestHead, body: bytes) -> Parsed | None:
        if head.length > MAX_BODY_BYTES or head.headers.get(b"content-type") not in _JSON_TYPES:
            return None
        try:
            parsed = _decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return Parsed(parsed.model, parsed.version, parsed)

    def build(self, parsed: Parsed, model: ServedModel, arrived: float) -> tuple[Request, bytes]:
        body, settings = parsed.context, self.frontend.settings
        lengths, data = validation.pack_inputs(body.inputs, input_field, model, settings)
        options = validation.Options(
            returns=check_returns(body.returns, model.spec),
            deadline_ms=validation.resolve_deadline_ms(body.deadline_ms, settings),
            priority=body.priority,
            exact_version=body.version is not None,
        )
        return validation.engine_request(lengths, options, model, arrived), data

    def write(self, model: ServedModel, answers: list[Answered]) -> list[Reply | ServiceError]:
        together = model.writer.write_all([(answer, data) for _, answer, data in answers])
        if together is not None:
            return [Reply(write_reply(model, outputs), _HEADERS) for outputs in together]
        return [_reply(model, answered) for answered in answers]


def _reply(model: ServedModel, answered: Answered) -> Reply | ServiceError:
    try:
        return Reply(write_reply(model, model.writer.write(answered.answer, answered.data)), _HEADERS)
    except ServiceError as error:
        return error
