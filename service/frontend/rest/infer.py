"""POST /infer: inputs in, outputs of the model's head out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from service.errors import InvalidInput, ServiceError
from service.frontend import server_timing, validation
from service.frontend.catalog import ServedModel
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.head_outputs import InferOutput, decode_arrays, input_field
from service.frontend.hot_calls import AnsweredCall, HotEndpoint, HttpReply, Parsed
from service.frontend.http_exchange import JSON, caller_of, cancel_on_disconnect, identity_of, named_session, read_json, respond
from service.frontend.inference import Frontend, TrackedRequest, count_answer, run_inference, track_request
from service.frontend.large_answers import LARGE_ANSWER_BYTES
from service.frontend.request_heads import RequestHead
from service.frontend.rest.schemas import JsonBody, SessionId, describe_body
from service.frontend.session_header import DESCRIPTION, resolve_session
from service.frontend.validation import MAX_SESSION_STEPS, PackedInputs
from service.ipc import messages
from service.ipc.messages import Api
from service.modeling.spec import ModelSpec
from service.settings import Settings

MAX_RETURNS = 8
"""Most names in `return`. A name may be repeated, but a list of a million names would stall the event loop."""
_JSON_TYPES = (None, JSON.encode(), b"application/json; charset=utf-8", b"application/json;charset=utf-8")
_HEADERS = b"content-type: " + JSON.encode() + b"\r\n"
Packer = Callable[[ServedModel], Awaitable[PackedInputs]]
"""Validates the inputs of a request for a model, and packs them."""
_ROWS = {"model": "sensor-forecast", "inputs": [[[0.1, 0.5, 0.3], [0.2, 0.4, 0.3]]]}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "text": {"model": "question-type", "inputs": ["How far is it from Denver to Aspen ?"]},
    "token_ids": {"model": "a-model-of-ids", "inputs": [[4, 11, 2, 7]]},
    "rows_of_numbers": _ROWS,
    "next_chunk_of_a_session": {**_ROWS, "session": "machine-7"},
}


class InferBody(JsonBody):
    """Body of POST /infer."""

    endpoint = "/infer"
    example = '{"model": "...", "inputs": [...]}'

    model: StrictStr
    """Name or alias of a served model."""
    inputs: Annotated[list[Any], Field(min_length=1)]
    """One sequence each: a string, a list of token ids, or a list of steps with a list of floats each, depending on the model."""
    version: StrictStr | Annotated[int, Field(strict=True)] | None = None
    """Version of the model; the newest by default."""
    returns: Annotated[list[Literal["embedding", "sequence", "state"]], Field(max_length=MAX_RETURNS)] = Field(
        [], alias="return"
    )
    """Adds vectors to each output: the pooled vector (embedding), the vector of every step (sequence), or the states of the recurrent
    layers after the sequence (state)."""
    states: list[dict[StrictStr, Any]] | None = None
    """The states from which the sequences start, one object for each input, as the outputs have them with state in return. A sequence
    starts as usual from the states that its object lacks."""
    session: SessionId | None = None
    """Id of a session. The request then has one input, the session's next chunk, and the output covers all steps so far."""
    start: StrictBool | None = None
    """Requires session. true restarts the session with this chunk, false only continues an open session; by default the chunk
    continues an open session or starts a new one."""
    end: StrictBool = False
    """Requires session. true closes the session after this chunk, which may be empty: the reply then has no outputs."""
    steps: Annotated[int, Field(ge=0, le=MAX_SESSION_STEPS, strict=True)] | None = None
    """Requires session. How many steps the session has before this chunk. A chunk that finds another number is refused."""
    deadline_ms: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """Milliseconds from arrival after which the reply is useless to the client."""
    priority: Annotated[int, Field(ge=-10, le=10, strict=True)] = 0
    """A request with a higher priority runs sooner."""

    def field_of(self, index: int) -> str:
        """Return the name of one input for an error message."""
        return input_field(index)


class InferFields(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The fields of an InferBody. A body that does not decode, or is not `complete`, takes the general path, which explains why."""

    model: str
    inputs: Annotated[list[Any], msgspec.Meta(min_length=1)]
    version: str | int | None = None
    session: str | None = None
    start: bool | None = None
    end: bool | msgspec.UnsetType = msgspec.UNSET
    steps: Annotated[int, msgspec.Meta(ge=0, le=MAX_SESSION_STEPS)] | None = None
    returns: Annotated[list[Literal["embedding", "sequence"]], msgspec.Meta(max_length=MAX_RETURNS)] = msgspec.field(
        default=[], name="return"
    )
    deadline_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-10, le=10)] = 0

    @property
    def complete(self) -> bool:
        """Return whether the fields of the session are valid together."""
        if self.session is None:
            return self.start is None and self.end is msgspec.UNSET and self.steps is None
        return len(self.inputs) == 1 and validation.is_session_id(self.session)


class SessionSteps(BaseModel):
    """The progress of a session."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    steps: int
    """Number of steps since the session began, including this chunk."""


class InferReply(BaseModel):
    """Reply to POST /infer: one output per input, in the order of the inputs, and the session's progress if there is a session."""

    model: str
    version: str
    outputs: list[InferOutput]
    session: SessionSteps | None = None


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add POST /infer."""

    extra = {"parameters": [DESCRIPTION], **describe_body(InferBody, **_EXAMPLES)}

    @router.post("/infer", response_model=InferReply, openapi_extra=extra)
    async def infer(request: Request) -> Response:
        """Run a model on each input."""
        with track_request(frontend, time.monotonic(), caller_of(request), Api.INFER, identity_of(request)) as tracked:
            tracked.timed = "prefer" in request.headers and server_timing.is_wanted(request)
            data = await read_json(request, frontend)
            header = named_session(request)
            response = respond(frontend, await cancel_on_disconnect(request, _answer_data(frontend, tracked, data, header)))
            if tracked.timed:
                server_timing.add(response, tracked.stages())
            return response


async def _answer_data(frontend: Frontend, tracked: TrackedRequest, data: bytes, header: str | None = None) -> bytes:
    """Return the JSON reply to the data of a body. header: the session that the header names."""
    if len(data) <= MAX_LOOP_BODY_BYTES:
        return await answer(frontend, tracked, parse_body(data, header))
    async with frontend.decoder.decode(messages.DecodeBody("infer", session=header), data) as decoded:
        body = InferBody.restore(decoded.options, inputs=[None])
        return await answer(frontend, tracked, body, decoded.pack)


def parse_body(data: bytes, header: str | None) -> InferBody:
    """Return the body of a request with its session; raises a ServiceError. header: the session that the header names."""
    body = InferBody.parse(data)
    if header is not None:
        body.session = resolve_session(body.session, header, "session")
    return body


async def answer(frontend: Frontend, tracked: TrackedRequest, body: InferBody, pack: Packer | None = None) -> bytes:
    """Return the JSON reply to a body of POST /infer, or to a chunk from /stream; raises a ServiceError.

    pack: packs the inputs of a body that the decoder has.
    """

    async def build(model: ServedModel) -> tuple[messages.Request, bytes | memoryview]:
        packed = pack_inputs(body, model, frontend.settings) if pack is None else await pack(model)
        return engine_request(body, packed, model, frontend.settings, tracked.arrived, body.field_of)

    model, (shapes, data) = await run_inference(frontend, tracked, body.model, body.version, body.session, build)
    start = time.monotonic()
    if len(data) <= LARGE_ANSWER_BYTES:
        encoded = write_reply(model, model.writer.write(shapes, data, body.field_of), body.session, shapes.session_steps)
    else:
        encoded = await _write_large_reply(frontend, model, shapes, data, body.field_of, body.session)
    count_answer(frontend.metrics, tracked, start)
    return encoded


async def _write_large_reply(
    frontend: Frontend,
    model: ServedModel,
    answer: messages.Answer,
    data: bytes | memoryview,
    field_of: Callable[[int], str],
    session: str | None,
) -> bytes:
    """Return what `write_reply` returns for a large answer; raises InvalidInput."""
    arrays = await asyncio.to_thread(decode_arrays, model.spec, answer, data, field_of)
    before, _, after = write_reply(model, b"\n", session, answer.session_steps).partition(b"\n")
    return await frontend.large_answers.join(chain([before], model.writer.pieces(answer, arrays), [after]))


def write_reply(model: ServedModel, outputs: bytes, session: str | None = None, session_steps: int = 0) -> bytes:
    """Return the JSON of an InferReply. outputs: from the model's OutputWriter."""
    if session is None:
        return b'{%b,"outputs":%b}' % (model.identity, outputs)
    progress = orjson.dumps({"id": session, "steps": session_steps})
    return b'{%b,"outputs":%b,"session":%b}' % (model.identity, outputs, progress)


def pack_inputs(body: InferBody, model: ServedModel, settings: Settings) -> PackedInputs:
    """Validate and pack the inputs and the states of a body; raises InvalidInput or TooLarge, which name the first wrong field."""
    _check_session_fields(body)
    packed = validation.pack_inputs(body.inputs, body.field_of, model, settings)
    return packed if body.states is None else validation.with_states(packed, body.states, "states", model)


def engine_request(
    body: InferBody | InferFields,
    packed: PackedInputs,
    model: ServedModel,
    settings: Settings,
    arrived: float,
    field_of: Callable[[int], str],
) -> tuple[messages.Request, bytes | memoryview]:
    """Return the engine's request and its tensor bytes; raises InvalidInput. field_of: returns the name of an input in error messages."""
    options = validation.Options(
        returns=check_returns(body.returns, model.spec),
        deadline_ms=validation.resolve_deadline_ms(body.deadline_ms, settings),
        priority=body.priority,
        session=body.session,
        session_starts=body.start,
        session_ends=body.end is True,
        session_at=body.steps,
        exact_version=body.version is not None,
    )
    if body.session is not None and not packed.lengths[0]:
        validation.check_empty_chunk(options, field_of(0))
    return validation.engine_request(packed, options, model, arrived), packed.data


def check_returns(returns: Sequence[str], spec: ModelSpec) -> messages.Returns:
    """Validate `return`. Raises InvalidInput for vectors that the model does not have."""
    for name in returns:
        if name not in spec.vectors:
            raise InvalidInput(f"{spec.name} has no {name} to return: leave {name} out of return", field="return")
    return validation.requested_returns(returns, spec)


def _check_session_fields(body: InferBody) -> None:
    """Raise InvalidInput for several inputs to one session, or for a field that requires a session without one."""
    if body.session is not None:
        validation.check_single_input(len(body.inputs))
        if body.states is not None or "state" in body.returns:
            raise InvalidInput(
                "a session keeps its state itself: leave out states and the state in return, or session", field="states"
            )
        return
    given = ("start", body.start is not None), ("end", "end" in body.model_fields_set), ("steps", body.steps is not None)
    for field, present in given:
        if present:
            raise InvalidInput(f"{field} requires session: name the session, or leave {field} out", field=field)


_decode = msgspec.json.Decoder(InferFields).decode


class HotInfer(HotEndpoint):
    """The endpoint on the hot path. The context of a call is its fields."""

    api = Api.INFER
    field_of = staticmethod(input_field)
    """Returns the name of an input for an error message."""

    def accepts(self, head: RequestHead) -> bool:
        in_limits = head.length <= MAX_LOOP_BODY_BYTES and head.length <= self.frontend.settings.max_body_bytes
        return in_limits and head.headers.get(b"content-type") in _JSON_TYPES

    def parse(self, head: RequestHead, body: bytes) -> Parsed | None:
        try:
            fields = _decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if head.session is not None:
            if fields.session not in (None, head.session):
                return None
            fields.session = head.session
        return Parsed(fields.model, fields.version, fields, fields.session) if fields.complete else None

    def build(self, parsed: Parsed, model: ServedModel, arrived: float) -> tuple[messages.Request, bytes | memoryview]:
        fields: InferFields = parsed.context
        packed = validation.pack_inputs(fields.inputs, self.field_of, model, self.frontend.settings)
        return engine_request(fields, packed, model, self.frontend.settings, arrived, self.field_of)

    def write(self, model: ServedModel, answers: list[AnsweredCall]) -> list[HttpReply | ServiceError]:
        together = model.writer.write_all([(answered.answer, answered.data) for answered in answers])
        if together is not None:
            return [_reply(model, answered, outputs) for answered, outputs in zip(answers, together, strict=True)]
        return [self._write(model, answered) for answered in answers]

    async def write_large(self, model: ServedModel, answered: AnsweredCall) -> HttpReply:
        session: str | None = answered.call.parsed.context.session
        content = await _write_large_reply(self.frontend, model, answered.answer, answered.data, self.field_of, session)
        return HttpReply(content, _HEADERS)

    def _write(self, model: ServedModel, answered: AnsweredCall) -> HttpReply | ServiceError:
        try:
            return _reply(model, answered, model.writer.write(answered.answer, answered.data, self.field_of))
        except ServiceError as error:
            return error


def _reply(model: ServedModel, answered: AnsweredCall, outputs: bytes) -> HttpReply:
    return HttpReply(write_reply(model, outputs, answered.call.parsed.context.session, answered.answer.session_steps), _HEADERS)
