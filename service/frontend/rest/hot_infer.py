"""POST /infer on the hot path: one-shot requests, answered together with the other answers of the same event-loop tick."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

import msgspec

from service.errors import ServiceError
from service.frontend import validation
from service.frontend.catalog import ServedModel
from service.frontend.dispatch.connection import PendingRequest
from service.frontend.head_outputs import input_field
from service.frontend.http_exchange import JSON
from service.frontend.http_protocol import Exchange
from service.frontend.inference import GONE, UNKNOWN_MODEL_LABELS, Frontend, RequestTally
from service.frontend.request_heads import RequestHead
from service.frontend.rest.infer import check_returns, write_reply
from service.ipc.messages import Answer, ModelKey

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


class HotInfer:
    """The endpoint."""

    def __init__(self, frontend: Frontend, tally: RequestTally) -> None:
        self._frontend = frontend
        self._decode = msgspec.json.Decoder(OneShotBody).decode
        self._tally = tally
        self._answered: dict[ModelKey, list[tuple[_Call, Answer, bytes]]] = {}

    def start(self, head: RequestHead, body: bytes, exchange: Exchange) -> _Call | None:
        """Validate a request and send it to an engine; see `Endpoint.start`."""
        arrived = time.monotonic()
        if head.length > MAX_BODY_BYTES or head.headers.get(b"content-type") not in _JSON_TYPES:
            return None
        parsed = self._decode(body)
        self._tally.accept()
        labels = UNKNOWN_MODEL_LABELS
        try:
            model = self._frontend.catalog.find(parsed.model, parsed.version)
            labels = model.key.labels
            call = _Call(self, exchange, model, arrived)
            self._submit(call, parsed)
        except ServiceError as error:
            self._tally.fail(labels, error.code, time.monotonic() - arrived)
            raise
        return call

    def _submit(self, call: _Call, body: OneShotBody) -> None:
        settings, model = self._frontend.settings, call.model
        lengths, data = validation.pack_inputs(body.inputs, input_field, model, settings)
        options = validation.Options(
            returns=check_returns(body.returns, model.spec),
            deadline_ms=validation.resolve_deadline_ms(body.deadline_ms, settings),
            priority=body.priority,
            exact_version=body.version is not None,
        )
        request = validation.engine_request(lengths, options, model, call.arrived)
        call.parsed = request.sent
        call.pending = self._frontend.dispatcher.send(request, data, call)

    def collect(self, call: _Call, answer: Answer, data: bytes) -> None:
        """Keep an answer until the end of the tick: answers written together cost less."""
        if not self._answered:
            asyncio.get_running_loop().call_soon(self._write_answers)
        self._answered.setdefault(call.model.key, []).append((call, answer, data))

    def fail(self, call: _Call, error: ServiceError) -> None:
        """Reply with the error that a request ended with."""
        self._tally.fail(call.model.key.labels, error.code, time.monotonic() - call.arrived)
        call.exchange.respond_error(error)

    def disconnect(self, call: _Call) -> None:
        """Cancel a request whose client closed the connection."""
        call.disconnected = True
        if call.pending is not None:
            self._frontend.dispatcher.cancel(call.pending)
        self._tally.fail(call.model.key.labels, GONE, time.monotonic() - call.arrived)

    def _write_answers(self) -> None:
        answered, self._answered = self._answered, {}
        for calls in answered.values():
            calls = [entry for entry in calls if not entry[0].disconnected]
            if calls:
                self._write_answers_of_model(calls[0][0].model, calls)

    def _write_answers_of_model(self, model: ServedModel, calls: list[tuple[_Call, Answer, bytes]]) -> None:
        start = time.monotonic()
        together = model.writer.write_all([(answer, data) for _, answer, data in calls])
        written = []
        for index, (call, answer, data) in enumerate(calls):
            try:
                outputs = together[index] if together is not None else model.writer.write(answer, data)
            except ServiceError as error:
                self.fail(call, error)
                continue
            call.exchange.respond(write_reply(model, outputs), _HEADERS)
            written.append(call)
        if written:
            now = time.monotonic()
            parse, total = [call.parsed - call.arrived for call in written], [now - call.arrived for call in written]
            self._tally.answer(model.key.labels, parse, total, now - start)


class _Call:
    """One request, from its start to its reply."""

    __slots__ = ("arrived", "disconnected", "endpoint", "exchange", "model", "parsed", "pending")

    def __init__(self, endpoint: HotInfer, exchange: Exchange, model: ServedModel, arrived: float) -> None:
        self.endpoint = endpoint
        self.exchange = exchange
        self.model = model
        self.arrived = self.parsed = arrived
        self.pending: PendingRequest | None = None
        self.disconnected = False

    def answered(self, answer: Answer, data: bytes) -> None:
        self.endpoint.collect(self, answer, data)

    def failed(self, error: ServiceError) -> None:
        self.endpoint.fail(self, error)

    def disconnect(self) -> None:
        self.endpoint.disconnect(self)
