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
from service.ipc.messages import Request


async def infer(
    frontend: Frontend, tracked: TrackedRequest, request: InferRequest, within_seconds: float = math.inf
) -> InferResponse:
    """Validate and run a request; raises a ServiceError. within_seconds: time until the call's own deadline, if it has one."""
    tensors, session = InputTensors(request.inputs), parameters.session_id(request.parameters)

    def build(model: ServedModel) -> tuple[Request, bytes]:
        outputs.check_requested(request.outputs, model.spec)
        options = parameters.request_options(request, session, model, frontend.settings, within_seconds * 1000)
        packed = tensors.pack(model, frontend.settings)
        if session is not None:
            validation.check_single_input(len(packed.lengths), "parameters.sequence_id")
        return validation.engine_request(packed.lengths, options, model, tracked.arrived), packed.values.tobytes()

    model, (answer, data) = await inference.run_inference(
        frontend, tracked, request.model, request.version or None, session, build
    )
    start = time.monotonic()
    arrays = head_outputs.decode_arrays(model.spec, answer, data, tensors.field_of)
    response = InferResponse(
        model=model.spec.name,
        version=model.version,
        id=request.id,
        parameters={"sequence_steps": answer.session_steps} if answer.session_steps else {},
        outputs=outputs.output_tensors(model.spec, arrays, answer.steps, request.outputs, tensors.ragged),
    )
    frontend.metrics.stage_seconds.observe(time.monotonic() - start, *tracked.labels, "encode")
    return response
