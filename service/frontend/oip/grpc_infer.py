"""ModelInfer on the hot path: calls answered with callbacks instead of tasks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from service.errors import ServiceError, Unavailable
from service.frontend import validation
from service.frontend.catalog import ServedModel
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.hot_calls import AnsweredCall, HotCall, HotEndpoint, HttpReply, Parsed, RequestTally
from service.frontend.http2.header_blocks import encode_fields
from service.frontend.http2.stream import Stream
from service.frontend.inference import Frontend
from service.frontend.oip import parameters, protobuf
from service.frontend.oip.binary_forms import BinaryForm, BinaryForms, FormKey, all_finite
from service.frontend.oip.grpc_calls import write_message
from service.frontend.oip.grpc_messages import ClassifyWriter, read_request, split_head, write_response, write_start
from service.frontend.oip.grpc_wire import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    error_status,
    frame_message,
    request_id_field,
    trailers_only,
)
from service.frontend.oip.infer import build_response, check_options, engine_request
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.json import ParsedRequest, RawOutputs
from service.frontend.oip.limits import max_loop_request_bytes
from service.frontend.oip.protobuf import METHODS
from service.frontend.oip.types import InferRequest
from service.frontend.oip.wire import MAX_UNSCANNED_BYTES
from service.frontend.origin import Header, RequestOrigin
from service.frontend.request_heads import RequestHead
from service.ipc.messages import Api, ModelKey, Request
from service.modeling.spec.heads import ClassifyHead

MAX_WRITERS = 64
"""Number of models with a kept writer. A reloaded model gets a new writer."""


@dataclass(frozen=True, slots=True)
class InferHead(RequestHead):
    """A call, as its fields describe it. deadline: monotonic time in seconds, infinite for none."""

    deadline: float = math.inf


NO_VALUES = memoryview(b"")
RAW_OUTPUTS = RawOutputs({}, default=True)
"""Every output of a response is sent as raw bytes."""


class _Context(NamedTuple):
    """The part of a request that the endpoint keeps.

    key: of the form that the request has or may get, None for a request of another kind. With a form, the raw values are in `values`, and
    `request` and `tensors` have none.
    """

    request: InferRequest
    tensors: InputTensors
    deadline: float
    key: FormKey | None
    form: BinaryForm | None = None
    values: memoryview = NO_VALUES


class HotGrpcInfer(HotEndpoint):
    """The endpoint."""

    api = Api.GRPC

    def __init__(self, frontend: Frontend, tally: RequestTally) -> None:
        super().__init__(frontend, tally)
        self._writers: dict[ModelKey, ClassifyWriter] = {}
        self._forms = BinaryForms(frontend.catalog, frontend.settings)
        self._max_bytes = max_loop_request_bytes(frontend.settings)

    def accepts(self, head: RequestHead) -> bool:
        return True  # the whole message has arrived

    def parse(self, head: RequestHead, body: bytes) -> Parsed | None:
        assert isinstance(head, InferHead)
        if len(body) > self._max_bytes:
            return None
        parts, key = split_head(body) if head.session is None else None, None
        if parts is not None:
            key = ("", parts.key)
            form = self._forms.find(key)
            if form is not None and form.fits(parts.values):
                request = form.parsed.request
                if parts.id:
                    request = msgspec.structs.replace(request, id=parts.id)
                context = _Context(request, form.tensors, head.deadline, key, form, parts.values)
                return Parsed(request.model, request.version or None, context)
        return self._parse_message(head, body, key)

    def _parse_message(self, head: InferHead, body: bytes, key: FormKey | None) -> Parsed | None:
        try:
            request = read_request(body)
            if request is None and len(body) <= MAX_UNSCANNED_BYTES:
                request = protobuf.infer_request(METHODS["ModelInfer"].parse(body))
            if request is None:
                return None
            has_session = bool(request.parameters) or head.session is not None
            session = parameters.session_id(request.parameters, head.session) if has_session else None
            tensors = InputTensors(request.inputs)
            if tensors.text_bytes > MAX_LOOP_BODY_BYTES:
                return None
        except ServiceError:
            return None  # the general path raises it again, and counts the request
        context = _Context(request, tensors, head.deadline, key if session is None else None)
        return Parsed(request.model, request.version or None, context, session)

    def build(self, parsed: Parsed, model: ServedModel, arrived: float) -> tuple[Request, bytes | memoryview]:
        context: _Context = parsed.context
        form, tensors, settings = context.form, context.tensors, self.frontend.settings
        seconds = max(0.0, context.deadline - arrived)
        if form is not None:
            packed = form.pack(context.values)
            if packed is not None:
                return validation.engine_request(packed, _within(form.options, seconds), model, arrived), packed.data
            tensors = form.decode(context.values)  # for the error that names the wrong value
        options = check_options(context.request, parsed.session, model, settings, seconds)
        request, data = engine_request(context.request, tensors, tensors.pack(model, settings), options, model, arrived)
        if context.key is not None and form is None and not request.has_states:
            without_id = msgspec.structs.replace(context.request, id="")
            self._forms.remember(context.key, ParsedRequest(without_id, RAW_OUTPUTS), model, request.lengths)
        return request, data

    def write(self, model: ServedModel, answers: list[AnsweredCall]) -> list[HttpReply | ServiceError]:
        whole = [_has_whole_response(answered) for answered in answers]
        if not all_finite([answered.data for answered, known in zip(answers, whole, strict=True) if known]):
            whole = [False] * len(answers)
        others = iter(
            self._write_others(model, [answered for answered, known in zip(answers, whole, strict=True) if not known])
        )
        return [
            _whole_reply(model, answered) if known else next(others) for answered, known in zip(answers, whole, strict=True)
        ]

    def _write_others(self, model: ServedModel, answers: list[AnsweredCall]) -> list[HttpReply | ServiceError]:
        together = self._write_together(model, answers) if answers else []
        if together is not None:
            return [HttpReply(response, b"") for response in together]
        return [_reply(model, answered) for answered in answers]

    async def write_large(self, model: ServedModel, answered: AnsweredCall) -> HttpReply:
        context: _Context = answered.call.parsed.context
        building = partial(build_response, context.request, context.tensors, model, answered.answer, answered.data)
        return HttpReply(await write_message(self.frontend, await asyncio.to_thread(building)), b"")

    def _write_together(self, model: ServedModel, answers: list[AnsweredCall]) -> list[bytes] | None:
        """Return the responses, or None unless all of them are simple."""
        if not isinstance(model.spec.head, ClassifyHead):  # the most frequent kind has a writer that prepares its whole message
            return None
        writer = self._writers.get(model.key)
        if writer is None:
            if len(self._writers) >= MAX_WRITERS:
                self._writers.clear()
            writer = self._writers[model.key] = ClassifyWriter(model, model.spec.head)
        for answered in answers:
            if answered.call.parsed.context.request.outputs or not writer.accepts(answered.answer, answered.data):
                return None
        return writer.write_all(
            [(answered.call.parsed.context.request.id, answered.answer, answered.data) for answered in answers]
        )


def _within(options: validation.Options, seconds: float) -> validation.Options:
    """Return options with the deadline of the call."""
    milliseconds = seconds * 1000
    return options if milliseconds >= options.deadline_ms else msgspec.structs.replace(options, deadline_ms=milliseconds)


def _has_whole_response(answered: AnsweredCall) -> bool:
    form: BinaryForm | None = answered.call.parsed.context.form
    return form is not None and form.answered_by(answered.data)


def _whole_reply(model: ServedModel, answered: AnsweredCall) -> HttpReply:
    """Return the reply that consists of the known response of a form and of the unchanged engine's answer."""
    context: _Context = answered.call.parsed.context
    assert context.form is not None and context.form.response is not None
    start = write_start(model.spec.name, model.version, context.request.id)
    return HttpReply(start + context.form.response + answered.data, b"")


def _reply(model: ServedModel, answered: AnsweredCall) -> HttpReply | ServiceError:
    try:
        return _write(model, answered)
    except ServiceError as error:
        return error


def _write(model: ServedModel, answered: AnsweredCall) -> HttpReply:
    """Return the reply; raises a ServiceError."""
    context: _Context = answered.call.parsed.context
    response = build_response(context.request, context.tensors, model, answered.answer, answered.data)
    if response.parameters:
        return HttpReply(protobuf.infer_response(response).SerializeToString(), b"")
    content, form = write_response(response), context.form
    if form is not None and form.response_size == len(answered.data):
        start = write_start(response.model, response.version, response.id)
        form.response = content[len(start) : len(content) - form.response_size]
    return HttpReply(content, b"")


class InferCall:
    """One ModelInfer call from its whole request to its response: the exchange of its request, and the handler of its stream."""

    __slots__ = ("_call", "_ended", "_frontend", "_stream", "origin", "request_id", "trace_headers")

    def __init__(self, stream: Stream, frontend: Frontend, origin: RequestOrigin, ended: Callable[[InferCall], None]) -> None:
        """ended: called when the call has its response or is cancelled."""
        self.origin = origin
        self.request_id = origin.request_id or frontend.request_ids.take()
        self.trace_headers: tuple[Header, ...] = ()
        self._stream = stream
        self._frontend = frontend
        self._ended = ended
        self._call: HotCall | None = None

    def start(self, endpoint: HotGrpcInfer, head: InferHead, message: bytes, arrived: float) -> bool:
        """Start the request; false when the general path must answer it."""
        try:
            self._call = endpoint.start(head, message, self, arrived)
        except ServiceError as error:
            self.respond_error(error)
        except Exception as error:
            self.respond_error(self._frontend.internal_error(error))
        else:
            return self._call is not None
        return True

    def respond(self, content: bytes | memoryview, headers: bytes) -> None:
        self._end()
        self._stream.respond(RESPONSE_HEADERS, frame_message(content), OK_TRAILERS + self._identity_fields())

    def respond_error(self, error: ServiceError) -> None:
        self._end()
        self._stream.send_headers(trailers_only(error_status(error)) + self._identity_fields(), last=True)

    def cut_off(self, error: Unavailable) -> None:
        """End the call before its answer."""
        if self._call is not None:
            call = self._call
            if call.pending is not None:
                self._frontend.dispatcher.cancel(call.pending)
            call.failed(error)

    def receive(self, data: bytes, ended: bool) -> None:
        """Nothing follows a whole request."""

    def lost(self) -> None:
        if self._call is not None:
            self._call.disconnect()
            self._end()

    def sent(self) -> None:
        """A response is sent as a whole."""

    def _identity_fields(self) -> bytes:
        """Return the part of the trailing metadata that names the request."""
        fields = request_id_field(self.request_id)
        return fields + encode_fields(self.trace_headers) if self.trace_headers else fields

    def _end(self) -> None:
        self._call = None
        self._ended(self)
