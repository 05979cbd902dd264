"""ModelInfer on the hot path: calls answered with callbacks instead of tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from service.errors import ServiceError, TooLarge, Unavailable
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.grpc.calls import message_parts, write_message
from service.frontend.grpc.messages import ClassifyWriter, read_request, split_head, write_response, write_start
from service.frontend.grpc.runner import GrpcCall
from service.frontend.grpc.wire import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    error_status,
    frame_message,
    request_id_field,
    trailers_only,
)
from service.frontend.http1.request_heads import RequestHead
from service.frontend.http2.header_blocks import encode_fields
from service.frontend.http2.stream import Stream
from service.frontend.oip import parameters, protobuf
from service.frontend.oip.binary_forms import FormKey
from service.frontend.oip.inputs import InputTensors, text_bytes
from service.frontend.oip.json import ParsedRequest, RawOutputs
from service.frontend.oip.large_requests import DecodedInputs, RequestOptions
from service.frontend.oip.protobuf import METHODS
from service.frontend.oip.runner import TensorContext, TensorRunner, form_of
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.oip.wire import MAX_UNSCANNED_BYTES, NotAMessage, split
from service.frontend.run.catalog import ServedModel
from service.frontend.run.exchange import HttpReply
from service.frontend.run.frontend import Frontend
from service.frontend.run.origin import Header, RequestOrigin
from service.frontend.run.runner import DecodedRequest, RunningRequest
from service.ipc.messages.decoder import DecodeBody
from service.ipc.messages.models import ModelKey
from service.ipc.messages.tracing import Api
from service.modeling.spec.heads import ClassifyHead

MAX_WRITERS = 64
"""Number of models with a kept writer. A reloaded model gets a new writer."""


@dataclass(frozen=True, slots=True)
class InferHead(RequestHead):
    """A call, as its fields describe it. deadline: monotonic time in seconds, infinite for none."""

    deadline: float = math.inf


FINAL_REQUESTED, FINAL = "triton_enable_empty_final_response", "triton_final_response"
"""Parameter of a request on a stream, and of its response. Every response is the only and therefore final response of its request."""
RESPONSE_FIELD = METHODS["ModelStreamInfer"].response_type.DESCRIPTOR.fields_by_name["infer_response"].number
RAW_OUTPUTS = RawOutputs({}, default=True)
"""Every output of a response is sent as raw bytes."""


class GrpcRunner(TensorRunner):
    """Runs the calls of ModelInfer."""

    api = Api.GRPC

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self._writers: dict[ModelKey, ClassifyWriter] = {}

    def accepts(self, head: RequestHead) -> bool:
        return True  # the whole message has arrived

    def decode(self, head: RequestHead, body: bytes) -> DecodedRequest | None:
        assert isinstance(head, InferHead)
        if len(body) > self._max_bytes:
            return None
        parts, key = split_head(body) if head.session is None else None, None
        if parts is not None:
            key = ("", parts.key)
            form = self._forms.find(key)
            if form is not None and form.fits(parts.values):
                parsed = form.parsed
                if parts.id:
                    parsed = ParsedRequest(msgspec.structs.replace(parsed.request, id=parts.id), RAW_OUTPUTS)
                context = TensorContext(parsed, form.tensors, head.deadline, key=key, form=form, values=parts.values)
                return self.decoded(None, context)
        return self._decode_message(head, body, key)

    def _decode_message(self, head: InferHead, body: bytes, key: FormKey | None) -> DecodedRequest | None:
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
        parsed = ParsedRequest(request, RAW_OUTPUTS)
        return self.decoded(session, TensorContext(parsed, tensors, head.deadline, key=key if session is None else None))

    async def decode_slowly(self, data: bytes, call: GrpcCall, stack: AsyncExitStack) -> DecodedRequest:
        """Return the request in a message of any size; raises a ServiceError.

        stack: holds a large message, which the decoder has, until the request has its reply.
        """
        request, tensors = await self._read(data, stack)
        session = parameters.session_id(request.parameters, call.session)
        context = TensorContext(ParsedRequest(request, RAW_OUTPUTS), tensors or InputTensors(request.inputs), call.deadline)
        return self.decoded(session, context)

    async def _read(self, data: bytes, stack: AsyncExitStack) -> tuple[InferRequest, DecodedInputs | None]:
        """Return a request, and its inputs if the decoder has them."""
        limit, messages = self.frontend.settings.max_body_bytes, METHODS["ModelInfer"]
        if len(data) > limit:
            raise TooLarge(
                f"the message has {len(data)} bytes, but SEQSERVE_MAX_BODY_BYTES is {limit}: "
                "send a smaller message, or raise SEQSERVE_MAX_BODY_BYTES"
            )
        if len(data) <= MAX_UNSCANNED_BYTES:
            return protobuf.infer_request(messages.parse(data)), None
        try:
            parts = split(data)
        except NotAMessage:
            raise messages.invalid() from None
        if len(parts.message) <= MAX_LOOP_BODY_BYTES:
            request = protobuf.infer_request(messages.parse(parts.message), parts.raw_contents)
            if text_bytes(request.inputs) <= MAX_LOOP_BODY_BYTES:
                return request, None
        body = await stack.enter_async_context(self.frontend.decoder.decode(DecodeBody("oip_protobuf"), data))
        options = msgspec.msgpack.decode(body.options, type=RequestOptions)
        return options.request(), DecodedInputs(options, body)

    def encode(self, response: InferResponse, context: TensorContext) -> HttpReply:
        if response.parameters:
            return HttpReply(protobuf.infer_response(response).SerializeToString(), b"")
        content, form = write_response(response), context.form
        if form is not None:
            start = write_start(response.model, response.version, response.id)
            end = len(content) - form.response_size
            form.response = content[len(start) : end]
        return HttpReply(content, b"")

    async def encode_large(self, response: InferResponse, context: TensorContext) -> HttpReply:
        return HttpReply(await write_message(self.frontend, response), b"")

    def has_whole_reply(self, call: RunningRequest) -> bool:
        return form_of(call) is not None

    def whole_reply(self, model: ServedModel, call: RunningRequest) -> HttpReply:
        context: TensorContext = call.decoded.context
        assert context.form is not None and context.form.response is not None
        start = write_start(model.spec.name, model.version, context.parsed.request.id)
        return HttpReply(start + context.form.response + call.data, b"")

    def remembered(self, parsed: ParsedRequest) -> ParsedRequest:
        """Return a request without its id, which is not in the key of its form."""
        return ParsedRequest(msgspec.structs.replace(parsed.request, id=""), RAW_OUTPUTS)

    def write_others(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        together = self._write_together(model, calls)
        if together is not None:
            return [HttpReply(response, b"") for response in together]
        return super().write_others(model, calls)

    def _write_together(self, model: ServedModel, calls: list[RunningRequest]) -> list[bytes] | None:
        """Return the responses, or None unless all of them are simple."""
        if not isinstance(model.spec.head, ClassifyHead):  # the most frequent kind has a writer that prepares its whole message
            return None
        writer = self._writers.get(model.key)
        if writer is None:
            if len(self._writers) >= MAX_WRITERS:
                self._writers.clear()
            writer = self._writers[model.key] = ClassifyWriter(model, model.spec.head)
        requests = [call.decoded.context.parsed.request for call in calls]
        for request, call in zip(requests, calls, strict=True):
            if request.outputs or not writer.accepts(call.answer, call.data):
                return None
        return writer.write_all([(request.id, call.answer, call.data) for request, call in zip(requests, calls, strict=True)])


class StreamRunner(GrpcRunner):
    """Runs the requests of ModelStreamInfer: their responses are fields of the messages of a stream."""

    api = Api.GRPC_STREAM

    def write(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        return [self._write(model, call) for call in calls]

    def encode(self, response: InferResponse, context: TensorContext) -> HttpReply:
        return HttpReply(b"".join(message_parts(_final(response, context), RESPONSE_FIELD)), b"")

    async def encode_large(self, response: InferResponse, context: TensorContext) -> HttpReply:
        return HttpReply(await write_message(self.frontend, _final(response, context), RESPONSE_FIELD), b"")


def _final(response: InferResponse, context: TensorContext) -> InferResponse:
    """Return a response that tells that it is the last of its request, if the request asks for it."""
    if not context.parsed.request.parameters.get(FINAL_REQUESTED):
        return response
    return msgspec.structs.replace(response, parameters={**response.parameters, FINAL: True})


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
        self._call: RunningRequest | None = None

    def start(self, endpoint: GrpcRunner, head: InferHead, message: bytes, arrived: float) -> bool:
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
            self._call.end(error)

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
