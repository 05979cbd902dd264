"""Translates an inference request of the Open Inference Protocol, for REST and for gRPC. Nothing here knows HTTP or gRPC."""

from __future__ import annotations

import math

from service.errors import InvalidInput
from service.frontend.oip import outputs, parameters
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.run import head_outputs, validation
from service.frontend.run.catalog import ServedModel
from service.frontend.run.validation import PackedInputs
from service.ipc.messages.inference import Answer, Request
from service.settings import Settings


def build_request(
    request: InferRequest,
    inputs: InputTensors | PackedInputs,
    session: str | None,
    model: ServedModel,
    settings: Settings,
    arrived: float,
    within_seconds: float = math.inf,
) -> tuple[Request, bytes | memoryview]:
    """Return the engine's request and its tensor bytes.

    Raises a ServiceError: for options or outputs that the model does not have, InvalidInput for several sequences in one session or for an
    empty chunk, TooLarge for a classification with too many entries.

    within_seconds: time until the call's own deadline, if it has one.
    """
    outputs.check_requested(request.outputs, model.spec)
    options = parameters.request_options(request, session, model, settings, within_seconds * 1000)
    packed = inputs.pack(model, settings) if isinstance(inputs, InputTensors) else inputs
    outputs.check_classes(request.outputs, model.spec, len(packed.lengths))
    if options.session is not None:
        validation.check_single_input(len(packed.lengths), "parameters.sequence_id")
        if not packed.lengths[0]:
            validation.check_empty_chunk(options.session_starts, options.session_ends, request.field_of(0))
    message = validation.engine_request(packed, options, model, arrived)
    if options.session is not None and message.has_states:
        raise InvalidInput(
            "a sequence keeps its state itself: leave its states out, or sequence_id", field="parameters.sequence_id"
        )
    return message, packed.data


def build_response(request: InferRequest, model: ServedModel, answer: Answer, data: bytes | memoryview) -> InferResponse:
    """Return the response to a request from the engine's answer and the bytes of its arrays; raises InvalidInput, TooLarge."""
    arrays = head_outputs.decode_arrays(model.spec, answer, data, request.field_of)
    return InferResponse(
        model=model.spec.name,
        version=model.version,
        id=request.id,
        parameters={"sequence_steps": answer.session_steps} if answer.session_steps else {},
        outputs=outputs.output_tensors(model.spec, arrays, answer.steps, request.outputs, request.ragged),
    )
