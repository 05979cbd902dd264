"""Runs the requests of ModelInfer and ModelStreamInfer."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from service.errors import ServiceError, TooLarge
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.grpc.messages import ClassifyWriter, read_request, response_parts, split_request, write_start
from service.frontend.grpc.wire import PREFIX
from service.frontend.http1.request_heads import RequestHead
from service.frontend.oip.protobuf import METHODS
from service.frontend.oip.runner import TensorContext, TensorRunner
from service.frontend.oip.templates import MAX_HEAD_BYTES
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.run.catalog import ServedModel
from service.frontend.run.exchange import HttpReply
from service.frontend.run.frontend import Frontend
from service.frontend.run.large_answers import LARGE_ANSWER_BYTES
from service.frontend.run.runner import DecodedRequest, RunningRequest
from service.ipc.messages.decoder import DecodeBody
from service.ipc.messages.models import ModelKey
from service.ipc.messages.tracing import Api
from service.modeling.spec.heads import ClassifyHead

MAX_WRITERS = 64
"""Number of models with a kept writer. A reloaded model gets a new writer."""
FINAL_REQUESTED, FINAL = "triton_enable_empty_final_response", "triton_final_response"
"""Parameter of a request on a stream, and of its response. Every response is the only and therefore final response of its request."""
RESPONSE_FIELD = METHODS["ModelStreamInfer"].response_type.DESCRIPTOR.fields_by_name["infer_response"].number


@dataclass(frozen=True, slots=True)
class InferHead(RequestHead):
    """A call, as its fields describe it. deadline: monotonic time in seconds, infinite for none."""

    deadline: float = math.inf


class GrpcRunner(TensorRunner):
    """Runs the calls of ModelInfer."""

    api = Api.GRPC

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self._writers: dict[ModelKey, ClassifyWriter] = {}

    def accepts(self, head: RequestHead) -> bool:
        return True  # the whole message has arrived

    def decode(self, head: RequestHead, body: bytes) -> DecodedRequest | None:
        """Return the request in a message, or None for a message that the decoder reads; raises a ServiceError."""
        assert isinstance(head, InferHead)
        return self._read(body, head.session, head.deadline)

    async def decode_slowly(self, data: bytes, session: str | None, deadline: float, stack: AsyncExitStack) -> DecodedRequest:
        """Return the request in a message of any size; raises a ServiceError.

        session: that the metadata names. stack: holds a large message, which the decoder has, until the request has its reply.
        """
        decoded = self._read(data, session, deadline)
        if decoded is None:
            decoded = await self.decode_large(DecodeBody("oip_protobuf"), data, session, stack, deadline, None)
        return decoded

    def _read(self, data: bytes, session: str | None, deadline: float) -> DecodedRequest | None:
        limit = self.frontend.settings.max_body_bytes
        if len(data) > limit:
            raise TooLarge(
                f"the message has {len(data)} bytes, but SEQSERVE_MAX_BODY_BYTES is {limit}: "
                "send a smaller message, or raise SEQSERVE_MAX_BODY_BYTES"
            )
        parts, key = split_request(data), None
        if session is None and len(parts.contents) == 1 and len(parts.head) <= MAX_HEAD_BYTES:
            [values] = parts.contents
            key = len(values), parts.head
            template = self.templates.find(key)
            if template is not None and template.fits(values):
                request = template.request
                if parts.id:
                    request = msgspec.structs.replace(request, id=parts.id)
                context = TensorContext(request, None, deadline, key=key, template=template, values=values)
                return DecodedRequest(request.model, request.version or None, context)
        if len(parts.head) > MAX_LOOP_BODY_BYTES and parts.refusal is None:
            return None
        request, inputs = read_request(parts)
        return self.decoded(session, TensorContext(request, inputs, deadline, key=key))

    def encode(self, response: InferResponse, context: TensorContext) -> HttpReply:
        return HttpReply(b"".join(response_parts(response)), b"")

    async def encode_large(self, response: InferResponse, context: TensorContext) -> HttpReply:
        return await self._join(response_parts(response))

    async def _join(self, parts: list[bytes | memoryview]) -> HttpReply:
        """Return the reply of a message, as `frame_message` takes it."""
        size = sum(map(len, parts))
        if size <= LARGE_ANSWER_BYTES:
            return HttpReply(b"".join(parts), b"")
        return HttpReply(memoryview(await self.frontend.large_answers.join([PREFIX.pack(0, size), *parts])), b"")

    def encode_start(self, model: ServedModel, request: InferRequest) -> bytes:
        return write_start(model.spec.name, model.version, request.id)

    def encode_whole(self, response: bytes, call: RunningRequest, context: TensorContext) -> HttpReply:
        return HttpReply(response + call.data, b"")

    def write_others(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        together = self._write_together(model, calls)
        return super().write_others(model, calls) if together is None else [HttpReply(each, b"") for each in together]

    def _write_together(self, model: ServedModel, calls: list[RunningRequest]) -> list[bytes] | None:
        """Return the responses, or None unless all of them are simple."""
        requests: list[InferRequest] = [call.decoded.context.request for call in calls]
        # The most frequent kind of head has a writer that prepares its whole message.
        if not isinstance(model.spec.head, ClassifyHead) or any(request.outputs for request in requests):
            return None
        writer = self._writers.get(model.key)
        if writer is None:
            if len(self._writers) >= MAX_WRITERS:
                self._writers.clear()
            writer = self._writers[model.key] = ClassifyWriter(model, model.spec.head)
        return writer.write_all([(request.id, call.answer, call.data) for request, call in zip(requests, calls, strict=True)])


class StreamRunner(GrpcRunner):
    """Runs the requests of ModelStreamInfer: their responses are fields of the messages of a stream."""

    api = Api.GRPC_STREAM

    def write(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        return [self._write(model, call) for call in calls]

    def encode(self, response: InferResponse, context: TensorContext) -> HttpReply:
        return HttpReply(b"".join(_field_parts(response, context)), b"")

    async def encode_large(self, response: InferResponse, context: TensorContext) -> HttpReply:
        return await self._join(_field_parts(response, context))


def _field_parts(response: InferResponse, context: TensorContext) -> list[bytes | memoryview]:
    """Return the parts of the message with a response, which tells that it is the last of its request if the request asks for it."""
    if context.request.parameters.get(FINAL_REQUESTED):
        response = msgspec.structs.replace(response, parameters={**response.parameters, FINAL: True})
    return response_parts(response, RESPONSE_FIELD)
