"""Translates an inference request of the Open Inference Protocol, for REST and for gRPC. Nothing here knows HTTP or gRPC."""

from __future__ import annotations

import asyncio
import math

from service.errors import InvalidInput
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.oip import outputs, parameters
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.large_requests import DecodedInputs
from service.frontend.oip.limits import MAX_LOOP_TENSOR_BYTES
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.run import head_outputs, validation
from service.frontend.run.catalog import ServedModel
from service.frontend.run.runner import Packer
from service.frontend.run.validation import PackedInputs
from service.ipc.messages.inference import Answer, Request
from service.settings import Settings


def slow_packer(tensors: InputTensors | DecodedInputs, settings: Settings) -> Packer | None:
    """Return what packs inputs that would occupy the event loop for long, None for small inputs."""
    if isinstance(tensors, DecodedInputs):
        return tensors.pack
    if tensors.value_bytes <= MAX_LOOP_TENSOR_BYTES and tensors.text_bytes <= MAX_LOOP_BODY_BYTES:
        return None

    async def pack(model: ServedModel) -> PackedInputs:
        return await asyncio.to_thread(tensors.pack, model, settings)

    return pack


def build_request(
    request: InferRequest,
    tensors: InputTensors | DecodedInputs,
    session: str | None,
    model: ServedModel,
    settings: Settings,
    arrived: float,
    within_seconds: float = math.inf,
    packed: PackedInputs | None = None,
) -> tuple[Request, bytes | memoryview]:
    """Return the engine's request and its tensor bytes.

    Raises a ServiceError: for options or outputs that the model does not have, InvalidInput for several sequences in one session or for an
    empty chunk, TooLarge for a classification with too many entries.

    tensors: the inputs of the request. within_seconds: time until the call's own deadline, if it has one. packed: the inputs, None if they
    are not packed yet.
    """
    outputs.check_requested(request.outputs, model.spec)
    options = parameters.request_options(request, session, model, settings, within_seconds * 1000)
    if packed is None:
        assert isinstance(tensors, InputTensors)
        packed = tensors.pack(model, settings)
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
