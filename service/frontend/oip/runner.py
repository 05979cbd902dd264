"""Runs inference requests of the Open Inference Protocol: what HTTP and gRPC share."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from typing import NamedTuple

import msgspec

from service.errors import ServiceError
from service.frontend.oip.binary_forms import BinaryForm, BinaryForms, FormKey, all_finite
from service.frontend.oip.infer import build_request, build_response, slow_packer
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.json import ParsedRequest
from service.frontend.oip.large_requests import DecodedInputs
from service.frontend.oip.limits import max_loop_request_bytes
from service.frontend.oip.types import InferResponse
from service.frontend.run import validation
from service.frontend.run.catalog import ServedModel
from service.frontend.run.exchange import HttpReply
from service.frontend.run.frontend import Frontend
from service.frontend.run.runner import DecodedRequest, RequestRunner, RunningRequest
from service.frontend.run.validation import PackedInputs
from service.ipc.messages.inference import Request

NO_VALUES = memoryview(b"")


class TensorContext(NamedTuple):
    """A request, and the values that its reply needs.

    deadline: of its call, in monotonic seconds. encoding: an encoding that the client accepts for the reply. key: of the form that the
    request has or may get, None for a request that gets no form. With a form, the raw values are in `values`, and `parsed` and `tensors`
    have none.
    """

    parsed: ParsedRequest
    tensors: InputTensors | DecodedInputs
    deadline: float = math.inf
    encoding: str | None = None
    key: FormKey | None = None
    form: BinaryForm | None = None
    values: bytes | memoryview = NO_VALUES


class TensorRunner(RequestRunner):
    """Runs the requests of one protocol. The context of a request is a TensorContext."""

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self._forms = BinaryForms(frontend.catalog, frontend.settings)
        self._max_bytes = max_loop_request_bytes(frontend.settings)

    @abstractmethod
    def encode(self, response: InferResponse, context: TensorContext) -> HttpReply:
        """Return the reply with a response."""

    @abstractmethod
    async def encode_large(self, response: InferResponse, context: TensorContext) -> HttpReply:
        """Return the reply with a response that would stall the event loop if it was written at once."""

    @abstractmethod
    def has_whole_reply(self, call: RunningRequest) -> bool:
        """Return whether the reply consists of the known response of a form and of the engine's answer as it is, if that is finite."""

    @abstractmethod
    def whole_reply(self, model: ServedModel, call: RunningRequest) -> HttpReply:
        """Return the reply of a request that has a whole reply."""

    def remembered(self, parsed: ParsedRequest) -> ParsedRequest:
        """Return a request as its form keeps it."""
        return parsed

    def decoded(self, session: str | None, context: TensorContext) -> DecodedRequest:
        """Return a request with its session and its context."""
        request = context.parsed.request
        pack = None if context.form is not None else slow_packer(context.tensors, self.frontend.settings)
        return DecodedRequest(request.model, request.version or None, context, session, pack)

    def build(
        self, decoded: DecodedRequest, model: ServedModel, arrived: float, packed: PackedInputs | None
    ) -> tuple[Request, bytes | memoryview]:
        context: TensorContext = decoded.context
        form, tensors, seconds = context.form, context.tensors, max(0.0, context.deadline - arrived)
        if form is not None:
            known = form.pack(context.values)
            if known is not None:
                return validation.engine_request(known, _within(form.options, seconds), model, arrived), known.data
            tensors = form.decode(context.values)  # for the error that names the wrong value
        parsed = context.parsed
        settings = self.frontend.settings
        request, data = build_request(parsed.request, tensors, decoded.session, model, settings, arrived, seconds, packed)
        if context.key is not None and not request.has_states:
            self._forms.remember(context.key, self.remembered(parsed), model, request.lengths)
        return request, data

    def write(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        whole = [self.has_whole_reply(call) for call in calls]
        if not all_finite([call.data for call, known in zip(calls, whole, strict=True) if known]):
            whole = [False] * len(calls)
        others = [call for call, known in zip(calls, whole, strict=True) if not known]
        replies = iter(self.write_others(model, others)) if others else iter(())
        return [self.whole_reply(model, call) if known else next(replies) for call, known in zip(calls, whole, strict=True)]

    def write_others(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        """Return the replies to requests without a whole reply."""
        return [self._write(model, call) for call in calls]

    async def write_large(self, model: ServedModel, call: RunningRequest) -> HttpReply:
        context: TensorContext = call.decoded.context
        return await self.encode_large(await asyncio.to_thread(_response, model, call), context)

    def _write(self, model: ServedModel, call: RunningRequest) -> HttpReply | ServiceError:
        context: TensorContext = call.decoded.context
        if context.form is not None and context.form.response_size != len(call.data):
            context = context._replace(form=None)
        try:
            return self.encode(_response(model, call), context)
        except ServiceError as error:
            return error


def form_of(call: RunningRequest) -> BinaryForm | None:
    """Return the form of a request whose response is known except for the engine's answer, which it contains unchanged."""
    form: BinaryForm | None = call.decoded.context.form
    return form if form is not None and form.answered_by(call.data) else None


def _response(model: ServedModel, call: RunningRequest) -> InferResponse:
    context: TensorContext = call.decoded.context
    return build_response(context.parsed.request, context.tensors, model, call.answer, call.data)


def _within(options: validation.Options, seconds: float) -> validation.Options:
    """Return options with the deadline of the call."""
    milliseconds = seconds * 1000
    return options if milliseconds >= options.deadline_ms else msgspec.structs.replace(options, deadline_ms=milliseconds)
