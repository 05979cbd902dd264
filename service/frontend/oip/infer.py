"""Runs an inference request of the Open Inference Protocol, for REST and for gRPC. Nothing here knows HTTP or gRPC."""

from __future__ import annotations

import math
import time

from service.frontend import head_outputs, inference, validation
from service.frontend.catalog import ServedModel
from service.frontend.inference import Frontend, TrackedRequest
from service.frontend.oip import outputs, parameters
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.types import InferRequest, InferResponse
from service.ipc.messages import Answer, Request
from service.settings import Settings


async def infer(
    frontend: Frontend, tracked: TrackedRequest, request: InferRequest, within_seconds: float = math.inf
) -> InferResponse:
    """Validate and run a request; raises a ServiceError. within_seconds: time until the call's own deadline, if it has one."""
    tensors, session = InputTensors(request.inputs), parameters.session_id(request.parameters)

    def build(model: ServedModel) -> tuple[Request, bytes]:
        return build_request(request, tensors, session, model, frontend.settings, tracked.arrived, within_seconds)

    model, (answer, data) = await inference.run_inference(
        frontend, tracked, request.model, request.version or None, session, build
    )
    start = time.monotonic()
    response = build_response(request, tensors, model, answer, data)
    frontend.metrics.stage_seconds.observe(time.monotonic() - start, *tracked.labels, "encode")
    return response


def build_request(
    request: InferRequest,
    tensors: InputTensors,
    session: str | None,
    model: ServedModel,
    settings: Settings,
    arrived: float,
    within_seconds: float = math.inf,
) -> tuple[Request, bytes]:
    """Return the engine's request and its tensor bytes; raises a ServiceError. tensors: the inputs of the request."""
    outputs.check_requested(request.outputs, model.spec)
    options = parameters.request_options(request, session, model, settings, within_seconds * 1000)
    packed = tensors.pack(model, settings)
    if session is not None:
        validation.check_single_input(len(packed.lengths), "parameters.sequence_id")
    return validation.engine_request(packed.lengths, options, model, arrived), packed.values.tobytes()


def build_response(
    request: InferRequest, tensors: InputTensors, model: ServedModel, answer: Answer, data: bytes
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
