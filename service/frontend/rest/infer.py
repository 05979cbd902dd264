"""POST /infer: inputs in, outputs of the model's head out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
import orjson
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from msgspec import UNSET, Meta, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from service.errors import InvalidInput, ServiceError
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.http1.request_heads import RequestHead
from service.frontend.rest import server_timing
from service.frontend.rest.http_exchange import JSON, answer_request, named_session, read_json
from service.frontend.rest.schemas import JsonBody, SessionId, describe_body
from service.frontend.run import validation
from service.frontend.run.catalog import ServedModel
from service.frontend.run.exchange import HttpReply
from service.frontend.run.frontend import Frontend
from service.frontend.run.head_outputs import InferOutput, decode_arrays, input_field
from service.frontend.run.runner import DecodedRequest, RequestRunner, RunningRequest
from service.frontend.run.session_header import DESCRIPTION, checked_header, resolve_session
from service.frontend.run.validation import MAX_SESSION_STEPS, PackedInputs
from service.ipc.messages.decoder import DecodeBody
from service.ipc.messages.inference import Answer, Request, Returns
from service.ipc.messages.tracing import Api
from service.modeling.spec import ModelSpec
from service.settings import Settings

MAX_RETURNS = 8
"""Most names in `return`. A name may be repeated, but a list of a million names would stall the event loop."""
_JSON_TYPES = (None, JSON.encode(), b"application/json; charset=utf-8", b"application/json;charset=utf-8")
_HEADERS = b"content-type: " + JSON.encode() + b"\r\n"
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

    model: Annotated[str, Meta(description="Name or alias of a served model.")]
    inputs: Annotated[
        list[Any],
        Meta(
            min_length=1,
            description="One sequence each: a string, a list of token ids, or a list of steps with a list of floats each, depending on the "
            "model.",
        ),
    ]
    version: Annotated[str | int | None, Meta(description="Version of the model; the newest by default.")] = None
    returns: Annotated[
        list[Literal["embedding", "sequence", "state"]],
        Meta(
            max_length=MAX_RETURNS,
            description="Adds vectors to each output: the pooled vector (embedding), the vector of every step (sequence), or the states of "
            "the recurrent layers after the sequence (state).",
        ),
    ] = msgspec.field(default=[], name="return")
    states: Annotated[
        list[dict[str, Any]] | None,
        Meta(
            description="The states from which the sequences start, one object for each input, as the outputs have them with state in "
            "return. A sequence starts as usual from the states that its object lacks."
        ),
    ] = None
    session: Annotated[
        SessionId | None,
        Meta(
            description="Id of a session. The request then has one input, the session's next chunk, and the output covers all steps so far."
        ),
    ] = None
    start: Annotated[
        bool | None,
        Meta(
            description="Requires session. true restarts the session with this chunk, false only continues an open session; by default the "
            "chunk continues an open session or starts a new one."
        ),
    ] = None
    end: Annotated[
        bool | UnsetType,
        Meta(
            description="Requires session. true closes the session after this chunk, which may be empty: the reply then has no outputs."
        ),
    ] = UNSET
    steps: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_SESSION_STEPS)] | None,
        Meta(
            description="Requires session. How many steps the session has before this chunk. A chunk that finds another number is refused."
        ),
    ] = None
    deadline_ms: Annotated[
        Annotated[float, Meta(gt=0), Field(allow_inf_nan=False)] | None,
        Meta(description="Milliseconds from arrival after which the reply is useless to the client."),
    ] = None
    priority: Annotated[int, Meta(ge=-10, le=10, description="A request with a higher priority runs sooner.")] = 0


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
    runner = InferRunner(frontend)
    extra = {"parameters": [DESCRIPTION], **describe_body(InferBody, **_EXAMPLES)}

    @router.post("/infer", response_model=InferReply, openapi_extra=extra)
    async def infer(request: HttpRequest) -> Response:
        """Run a model on each input."""

        async def decode(data: bytes, stack: AsyncExitStack) -> DecodedRequest:
            decoded = await runner.decode_slowly(data, named_session(request), stack)
            timed = "prefer" in request.headers and server_timing.is_wanted(request)
            return msgspec.structs.replace(decoded, timed=timed)

        return await answer_request(frontend, request, runner, read_json, decode)


def parse_body(data: bytes, header: str | None) -> InferBody:
    """Return the body of a request with its session; raises a ServiceError. header: the session that the header names."""
    body = InferBody.parse(data)
    if body.session is not None:
        validation.check_session_id(body.session)
    if header is not None:
        body.session = resolve_session(body.session, header, "session")
    return body


async def _write_large_reply(
    frontend: Frontend,
    model: ServedModel,
    answer: Answer,
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
    return b'{%b,"outputs":%b,"session":{"id":%b,"steps":%d}}' % (model.identity, outputs, orjson.dumps(session), session_steps)


def pack_inputs(
    body: InferBody, model: ServedModel, settings: Settings, field_of: Callable[[int], str] = input_field
) -> PackedInputs:
    """Validate and pack the inputs and the states of a body; raises InvalidInput or TooLarge, which name the first wrong field.

    field_of: returns the name of an input in error messages.
    """
    _check_session_fields(body)
    packed = validation.pack_inputs(body.inputs, field_of, model, settings)
    return packed if body.states is None else validation.with_states(packed, body.states, "states", model)


def engine_request(
    body: InferBody,
    packed: PackedInputs,
    model: ServedModel,
    settings: Settings,
    arrived: float,
    field_of: Callable[[int], str],
) -> tuple[Request, bytes | memoryview]:
    """Return the engine's request and its tensor bytes; raises InvalidInput. field_of: returns the name of an input in error messages."""
    returns, deadline_ms = check_returns(body.returns, model.spec), validation.resolve_deadline_ms(body.deadline_ms, settings)
    of_session = body.session, body.start, body.end is True, body.steps
    options = validation.Options(*(returns, deadline_ms, body.priority, *of_session, body.version is not None))
    if body.session is not None and not packed.lengths[0]:
        validation.check_empty_chunk(body.start, body.end is True, field_of(0))
    return validation.engine_request(packed, options, model, arrived), packed.data


def check_returns(returns: Sequence[str], spec: ModelSpec) -> Returns:
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
    given = ("start", body.start is not None), ("end", body.end is not UNSET), ("steps", body.steps is not None)
    for field, present in given:
        if present:
            raise InvalidInput(f"{field} requires session: name the session, or leave {field} out", field=field)


class InferRunner(RequestRunner):
    """Runs the requests of POST /infer. The context of a request is its body."""

    api = Api.INFER
    field_of = staticmethod(input_field)
    """Returns the name of an input for an error message."""

    def accepts(self, head: RequestHead) -> bool:
        in_limits = head.length <= MAX_LOOP_BODY_BYTES and head.length <= self.frontend.settings.max_body_bytes
        return in_limits and head.headers.get(b"content-type") in _JSON_TYPES

    def decode(self, head: RequestHead, body: bytes) -> DecodedRequest:
        return _decoded(parse_body(body, checked_header(head.session)))

    async def decode_slowly(self, data: bytes, header: str | None, stack: AsyncExitStack) -> DecodedRequest:
        """Return the request in a body of any size; raises a ServiceError. header: the session that the header names.

        stack: holds a large body, which the decoder has, until the request has its reply.
        """
        if len(data) <= MAX_LOOP_BODY_BYTES:
            return _decoded(parse_body(data, header))
        large = await stack.enter_async_context(self.frontend.decoder.decode(DecodeBody("infer", session=header), data))
        body = msgspec.json.decode(large.options, type=InferBody)
        return msgspec.structs.replace(_decoded(body), pack=large.pack)

    def build(
        self, decoded: DecodedRequest, model: ServedModel, arrived: float, packed: PackedInputs | None
    ) -> tuple[Request, bytes | memoryview]:
        body: InferBody = decoded.context
        settings = self.frontend.settings
        if packed is None:
            packed = pack_inputs(body, model, settings, self.field_of)
        return engine_request(body, packed, model, settings, arrived, self.field_of)

    def write(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        together = model.writer.write_all([(call.answer, call.data) for call in calls])
        if together is not None:
            return [_reply(model, call, outputs) for call, outputs in zip(calls, together, strict=True)]
        return [self._write(model, call) for call in calls]

    async def write_large(self, model: ServedModel, call: RunningRequest) -> HttpReply:
        session = call.decoded.session
        content = await _write_large_reply(self.frontend, model, call.answer, call.data, self.field_of, session)
        return HttpReply(content, _HEADERS)

    def _write(self, model: ServedModel, call: RunningRequest) -> HttpReply | ServiceError:
        try:
            return _reply(model, call, model.writer.write(call.answer, call.data, self.field_of))
        except ServiceError as error:
            return error


def _decoded(body: InferBody) -> DecodedRequest:
    return DecodedRequest(body.model, body.version, body, body.session)


def _reply(model: ServedModel, call: RunningRequest, outputs: bytes) -> HttpReply:
    return HttpReply(write_reply(model, outputs, call.decoded.session, call.answer.session_steps), _HEADERS)
