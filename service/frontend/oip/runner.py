"""Runs inference requests of the Open Inference Protocol: what HTTP and gRPC share."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec

from service.errors import ServiceError
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.oip.infer import build_request, build_response
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.limits import MAX_LOOP_TENSOR_BYTES
from service.frontend.oip.parameters import session_id
from service.frontend.oip.templates import RequestTemplate, TemplateKey, Templates, all_finite
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.run import validation
from service.frontend.run.catalog import ServedModel
from service.frontend.run.exchange import HttpReply
from service.frontend.run.frontend import Frontend
from service.frontend.run.runner import DecodedRequest, Packer, RequestRunner, RunningRequest
from service.frontend.run.validation import PackedInputs
from service.ipc.messages.decoder import DecodeBody
from service.ipc.messages.inference import Request

NO_VALUES = memoryview(b"")


class TensorContext(NamedTuple):
    """A request, and the values that its reply needs.

    inputs: None if the decoder has them, or if they are the raw `values` of a template. deadline: of its call, in monotonic seconds.
    encoding: an encoding that the client accepts for the reply. key: of the template that the request has or may get, None for a request
    that gets no template.
    """

    request: InferRequest
    inputs: InputTensors | None
    deadline: float = math.inf
    encoding: str | None = None
    key: TemplateKey | None = None
    template: RequestTemplate | None = None
    values: bytes | memoryview = NO_VALUES


class TensorRunner(RequestRunner):
    """Runs the requests of one protocol. The context of a request is a TensorContext."""

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self.templates = Templates(frontend.catalog, frontend.settings)

    @abstractmethod
    def encode(self, response: InferResponse, context: TensorContext) -> HttpReply:
        """Return the reply with a response."""

    @abstractmethod
    async def encode_large(self, response: InferResponse, context: TensorContext) -> HttpReply:
        """Return the reply with a response that would stall the event loop if it was written at once."""

    @abstractmethod
    def encode_start(self, model: ServedModel, request: InferRequest) -> bytes:
        """Return the first bytes of a response that are not in the template of its request, because the next request may have others."""

    @abstractmethod
    def encode_whole(self, response: bytes, call: RunningRequest, context: TensorContext) -> HttpReply | None:
        """Return the reply of a response before the engine's answer and of that answer as it is, None if it must be written otherwise."""

    def decoded(self, header: str | None, context: TensorContext) -> DecodedRequest | None:
        """Return a request, or None if it has large texts, which the decoder handles; raises InvalidInput for its session.

        header: the session that x-session-id names.
        """
        assert context.inputs is not None
        if context.inputs.text_bytes > MAX_LOOP_BODY_BYTES:
            return None
        return self.with_session(header, context, self.slow_packer(context.inputs))

    async def decode_large(
        self, body: DecodeBody, data: bytes, header: str | None, stack: AsyncExitStack, deadline: float, encoding: str | None
    ) -> DecodedRequest:
        """Return a request that the decoder reads; raises a ServiceError.

        header: the session that x-session-id names. stack: holds the inputs, which the decoder has, until the request has its reply.
        """
        decoded = await stack.enter_async_context(self.frontend.decoder.decode(body, data))
        request = msgspec.msgpack.decode(decoded.options, type=InferRequest)
        return self.with_session(header, TensorContext(request, None, deadline, encoding), decoded.pack)

    def with_session(self, header: str | None, context: TensorContext, pack: Packer | None) -> DecodedRequest:
        """Return a request with its session, which header and parameters may name; raises InvalidInput."""
        request, session = context.request, None
        if request.parameters or header is not None:
            session = session_id(request.parameters, header)
        if session is not None and context.key is not None:
            context = context._replace(key=None)
        return DecodedRequest(request.model, request.version or None, context, session, pack)

    def slow_packer(self, inputs: InputTensors) -> Packer | None:
        """Return what packs inputs that would occupy the event loop for long, None for small inputs."""
        if inputs.value_bytes <= MAX_LOOP_TENSOR_BYTES and inputs.text_bytes <= MAX_LOOP_BODY_BYTES:
            return None

        async def pack(model: ServedModel) -> PackedInputs:
            return await asyncio.to_thread(inputs.pack, model, self.frontend.settings)

        return pack

    def build(
        self, decoded: DecodedRequest, model: ServedModel, arrived: float, packed: PackedInputs | None
    ) -> tuple[Request, bytes | memoryview]:
        context: TensorContext = decoded.context
        template, inputs, seconds = context.template, context.inputs, max(0.0, context.deadline - arrived)
        if template is not None:
            known = template.pack(context.values)
            if known is not None:
                return validation.engine_request(known, _within(template.options, seconds), model, arrived), known.data
            inputs = template.decode(context.values)  # for the error that names the wrong value
        sent = packed or inputs
        assert sent is not None
        settings = self.frontend.settings
        request, data = build_request(context.request, sent, decoded.session, model, settings, arrived, seconds)
        if context.key is not None and inputs is not None and not request.has_states:
            self.templates.remember(context.key, context.request, inputs, model, request.lengths)
        return request, data

    def write(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        replies = [self._whole_reply(model, call) for call in calls]
        whole = [call.data for call, reply in zip(calls, replies, strict=True) if reply is not None]
        if whole and not all_finite(whole):
            replies = [None] * len(calls)
        others = [call for call, reply in zip(calls, replies, strict=True) if reply is None]
        written = iter(self.write_others(model, others) if others else ())
        return [next(written) if reply is None else reply for reply in replies]

    def write_others(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        """Return the replies to requests whose template does not have the response."""
        return [self._write_first(model, call) for call in calls]

    async def write_large(self, model: ServedModel, call: RunningRequest) -> HttpReply:
        context: TensorContext = call.decoded.context
        return await self.encode_large(await asyncio.to_thread(_response, model, call), context)

    def _whole_reply(self, model: ServedModel, call: RunningRequest) -> HttpReply | None:
        """Return the reply if the response is known but for the engine's answer, which it contains unchanged if that is finite."""
        context: TensorContext = call.decoded.context
        template = context.template
        if template is None or template.response is None or len(call.data) != template.response_size:
            return None
        return self.encode_whole(self.encode_start(model, context.request) + template.response, call, context)

    def _write(self, model: ServedModel, call: RunningRequest) -> HttpReply | ServiceError:
        context: TensorContext = call.decoded.context
        try:
            return self.encode(_response(model, call), context)
        except ServiceError as error:
            return error

    def _write_first(self, model: ServedModel, call: RunningRequest) -> HttpReply | ServiceError:
        """Return the reply to a request, and add the response to its template."""
        reply, size = self._write(model, call), len(call.data)
        context: TensorContext = call.decoded.context
        template = context.template
        if template is not None and size and template.response_size == size and isinstance(reply, HttpReply):
            start = len(self.encode_start(model, context.request))
            template.response = bytes(reply.content[start : len(reply.content) - size])
        return reply


def _response(model: ServedModel, call: RunningRequest) -> InferResponse:
    return build_response(call.decoded.context.request, model, call.answer, call.data)


def _within(options: validation.Options, seconds: float) -> validation.Options:
    """Return options with the deadline of the call."""
    milliseconds = seconds * 1000
    return options if milliseconds >= options.deadline_ms else msgspec.structs.replace(options, deadline_ms=milliseconds)
