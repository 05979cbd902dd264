"""Runs an inference request of the Open Inference Protocol, for REST and for gRPC. Nothing here knows HTTP or gRPC."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial

from service.errors import InvalidInput
from service.frontend import head_outputs, inference, validation
from service.frontend.catalog import ServedModel
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.inference import Frontend, TrackedRequest
from service.frontend.large_answers import LARGE_ANSWER_BYTES
from service.frontend.oip import outputs, parameters
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.large_requests import DecodedInputs
from service.frontend.oip.limits import MAX_LOOP_TENSOR_BYTES
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.validation import PackedInputs
from service.ipc.messages import Answer, Request
from service.settings import Settings


async def infer(
    frontend: Frontend,
    tracked: TrackedRequest,
    request: InferRequest,
    within_seconds: float = math.inf,
    decoded: DecodedInputs | None = None,
    header: str | None = None,
) -> InferResponse:
    """Validate and run a request; raises a ServiceError.

    within_seconds: time until the call's own deadline, if it has one. decoded: the only inputs of a large request.
    header: the session in x-session-id.
    """
    tensors = InputTensors(request.inputs) if decoded is None else decoded
    session = parameters.session_id(request.parameters, header)

    async def build(model: ServedModel) -> tuple[Request, bytes | memoryview]:
        options = check_options(request, session, model, frontend.settings, within_seconds)
        packed = await _pack(tensors, model, frontend.settings)
        return engine_request(request, tensors, packed, options, model, tracked.arrived)

    model, (answer, data) = await inference.run_inference(
        frontend, tracked, request.model, request.version or None, session, build
    )
    start = time.monotonic()
    building = partial(build_response, request, tensors, model, answer, data)
    response = building() if len(data) <= LARGE_ANSWER_BYTES else await asyncio.to_thread(building)
    inference.count_answer(frontend.metrics, tracked, start)
    return response


async def _pack(tensors: InputTensors | DecodedInputs, model: ServedModel, settings: Settings) -> PackedInputs:
    if isinstance(tensors, DecodedInputs):
        return await tensors.pack(model)
    if tensors.value_bytes <= MAX_LOOP_TENSOR_BYTES and tensors.text_bytes <= MAX_LOOP_BODY_BYTES:
        return tensors.pack(model, settings)
    return await asyncio.to_thread(tensors.pack, model, settings)


def build_request(
    request: InferRequest,
    tensors: InputTensors,
    session: str | None,
    model: ServedModel,
    settings: Settings,
    arrived: float,
) -> tuple[Request, bytes | memoryview]:
    """Return the engine's request and its tensor bytes; raises a ServiceError. tensors: the inputs of the request."""
    options = check_options(request, session, model, settings)
    return engine_request(request, tensors, tensors.pack(model, settings), options, model, arrived)


def check_options(
    request: InferRequest, session: str | None, model: ServedModel, settings: Settings, within_seconds: float = math.inf
) -> validation.Options:
    """Return the options of a request; raises a ServiceError for options or outputs that the model does not have."""
    outputs.check_requested(request.outputs, model.spec)
    return parameters.request_options(request, session, model, settings, within_seconds * 1000)


def engine_request(
    request: InferRequest,
    tensors: InputTensors | DecodedInputs,
    packed: PackedInputs,
    options: validation.Options,
    model: ServedModel,
    arrived: float,
) -> tuple[Request, bytes | memoryview]:
    """Return the engine's request and its tensor bytes. Raises InvalidInput for several sequences in one session or for an empty chunk,
    TooLarge for a classification with too many entries.
    """
    outputs.check_classes(request.outputs, model.spec, len(packed.lengths))
    if options.session is not None:
        validation.check_single_input(len(packed.lengths), "parameters.sequence_id")
        if not packed.lengths[0]:
            validation.check_empty_chunk(options, tensors.field_of(0))
    message = validation.engine_request(packed, options, model, arrived)
    if options.session is not None and message.has_states:
        raise InvalidInput(
            "a sequence keeps its state itself: leave its states out, or sequence_id", field="parameters.sequence_id"
        )
    return message, packed.data


def build_response(
    request: InferRequest, tensors: InputTensors | DecodedInputs, model: ServedModel, answer: Answer, data: bytes | memoryview
) -> InferResponse:
    """Return the response to a request from the engine's answer and the bytes of its arrays; raises InvalidInput, TooLarge."""
    arrays = head_outputs.decode_arrays(model.spec, answer, data, tensors.field_of)
    return InferResponse(
        model=model.spec.name,
        version=model.version,
        id=request.id,
        parameters={"sequence_steps": answer.session_steps} if answer.session_steps else {},
        outputs=outputs.output_tensors(model.spec, arrays, answer.steps, request.outputs, tensors.ragged),
    )
