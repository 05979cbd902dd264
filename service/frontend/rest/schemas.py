"""Bytes to values and back, for the JSON doors. What may be sent is said here, of a sequence itself in `checked`; nothing here awaits."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError, WithJsonSchema

from service.errors import InvalidInput, InvalidRequest, ServiceError, TooLarge
from service.frontend import validation
from service.frontend.head_outputs import Output, input_field
from service.frontend.served_model import ServedModel
from service.frontend.wording import shown
from service.ipc.messages import Request, Returns
from service.modeling.spec import ModelSpec
from service.settings import Settings

OWN_SESSION = "stream:"
"""With this begin the sessions that the service names, and no caller's."""
_SESSION = re.compile(rf"(?!{OWN_SESSION})[!-~]([ -~]{{0,126}}[!-~])?", re.ASCII)
SESSION_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": f"^{_SESSION.pattern}$"}


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller says of a request as a whole, whatever his door calls it; each is described where InferBody has it.

    exactly: he named the version.
    """

    returns: Returns
    deadline_ms: float
    priority: int = 0
    session: str | None = None
    starts: bool | None = None
    ends: bool = False
    exactly: bool = False


def session_id(text: str, *, field: str = "session") -> str:
    """The name of a session as a caller may give it; raises InvalidInput."""
    if not _SESSION.fullmatch(text):
        raise InvalidInput(
            f"{field} has to be 1 to 128 printable ASCII characters, without spaces at either end, "
            f"and must not begin with {OWN_SESSION!r}: name it so",
            field=field,
        )
    return text


Session = Annotated[StrictStr, AfterValidator(session_id), WithJsonSchema(SESSION_SCHEMA)]


class Body(BaseModel):
    """One JSON object of a caller's. of: where it has its place; what: what a message calls it; like: an example."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    of: ClassVar[str]
    what: ClassVar[str] = "the body"
    like: ClassVar[str]

    @classmethod
    def parse(cls, data: bytes | str) -> Self:
        """Raises InvalidRequest for what is not JSON, InvalidInput naming the first field that is wrong."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as fault:
            raise _invalid(cls, fault.errors(include_url=False)[0]) from None


class InferBody(Body):
    """Body of POST /infer."""

    of = "/infer"
    like = '{"model": "...", "inputs": [...]}'

    model: StrictStr
    """Name of a served model."""
    inputs: Annotated[list[Any], Field(min_length=1)]
    """One sequence each: a string, a list of token ids, or a list of rows of floats, as the model takes them."""
    version: StrictStr | Annotated[int, Field(strict=True)] | None = None
    """The newest when left out."""
    returns: Annotated[list[Literal["embedding", "sequence"]], Field(alias="return")] = []
    """Adds to each output the pooled vector (embedding) or the vectors of every step (sequence)."""
    session: Session | None = None
    """Name of a session: the one input is its next chunk, and the answer that of all its steps so far."""
    start: StrictBool | None = None
    """Of a session: true begins it anew, whatever there was; false goes on with it; left out, it goes on, or begins."""
    end: StrictBool = False
    """Of a session: nothing comes after this chunk."""
    deadline_ms: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """Milliseconds from arrival after which the answer is of no use."""
    priority: Annotated[int, Field(ge=-10, le=10, strict=True)] = 0
    """Higher runs sooner."""

    def field_of(self, index: int) -> str:
        """How an error names one of the inputs."""
        return input_field(index)


class Message(Body):
    """One text message on /stream."""

    of = "a message on /stream"
    what = "the message"
    like = '{"input": ...}'

    input: Any
    """The next chunk: a string, a list of token ids, or a list of rows of floats, as the model takes them."""
    start: StrictBool | None = None
    """true begins the session anew with this chunk, whatever there was; false goes on with it."""
    end: StrictBool = False
    """Nothing comes after this chunk: the next one begins the session anew."""

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Message:
        """A message as ASGI has it. One of bytes is nothing but a chunk."""
        data = message.get("bytes")
        return cls.parse(message["text"]) if data is None else cls.model_construct(input=bytes(data))


class ChunkBody(InferBody):
    """What a message on /stream asks for, with all that its socket has said."""

    def field_of(self, index: int) -> str:
        return "input"

    def chunk(self, message: Message, *, goes_on: bool) -> ChunkBody:
        """goes_on: the session has begun, and a message that does not say otherwise is no other's chunk."""
        start = False if message.start is None and goes_on else message.start
        return self.model_copy(update={"inputs": [message.input], "start": start, "end": message.end})


class ForkBody(Body):
    """Body of POST /sessions/{id}/fork."""

    of = "/sessions/{id}/fork"
    like = '{"session": "..."}'

    session: Session
    """Name of the copy."""


class Query(BaseModel):
    """A query of a caller's. of: the path that takes it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    of: ClassVar[str]

    @classmethod
    def parse(cls, items: Iterable[tuple[str, str]]) -> Self:
        """Raises InvalidInput naming the first parameter that is wrong."""
        try:
            return cls.model_validate(cls.gathered(items))
        except ValidationError as fault:
            raise _invalid_query(cls, fault.errors(include_url=False)[0]) from None

    @classmethod
    def gathered(cls, items: Iterable[tuple[str, str]]) -> dict[str, Any]:
        """By name; what is said last counts."""
        return dict(items)


class TraceQuery(Query):
    """Query of POST /debug/trace."""

    of = "/debug/trace"

    batches: Annotated[int, Field(ge=1, le=1000)] = 50
    """How many turns to record of every engine."""
    seconds: Annotated[float, Field(gt=0, le=60)] = 10.0
    """How long to wait for them; what came by then is the trace."""


class StreamQuery(Query):
    """Query of /stream: what all chunks of a socket have in common."""

    of = "/stream"

    model: str
    """Name of a served model."""
    version: str | None = None
    """The newest when left out."""
    session: Session | None = None
    """Name of a session, which stays open when the socket closes; left out, the socket has one of its own, which ends with it."""
    returns: Annotated[list[Literal["embedding", "sequence"]], Field(alias="return")] = []
    """Adds to each answer the pooled vector (embedding) or the vectors of every step (sequence); repeated, or with commas."""
    deadline_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Milliseconds from a chunk's arrival after which its answer is of no use."""
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    """Higher runs sooner."""

    @classmethod
    def gathered(cls, items: Iterable[tuple[str, str]]) -> dict[str, Any]:
        pairs = list(items)
        wanted = [part for name, said in pairs if name == "return" for part in said.split(",")]
        return dict(pairs) | ({"return": wanted} if wanted else {})


class SessionAnswer(BaseModel):
    """Answer of the routes of one session."""

    session: str


class SessionSteps(BaseModel):
    """Where a session is now."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    steps: int
    """All that it has had, those of this chunk included."""


class InferAnswer(BaseModel):
    """Answer of POST /infer: one output per input, in their order, and where the session is, if one was named."""

    model: str
    version: str
    outputs: list[Output]
    session: SessionSteps | None = None


class ErrorBody(BaseModel):
    """Body of every error."""

    error: str
    code: str
    field: str | None = None


def stream_body(query: StreamQuery, session: str, spec: ModelSpec, settings: Settings) -> ChunkBody:
    """What all chunks of a socket have in common, `session` among it; raises a ServiceError for what no chunk could have.

    spec: of the model that is named now.
    """
    body = ChunkBody.model_construct(
        model=query.model,
        inputs=[],
        version=query.version,
        returns=query.returns,
        session=session,
        deadline_ms=query.deadline_ms,
        priority=query.priority,
    )
    _returns(body, spec)
    deadline_ms(body.deadline_ms, settings)
    return body


def described(body: type[Body], example: dict[str, Any]) -> dict[str, Any]:
    """A body that is read and validated here, as the API's description has it."""
    schema = body.model_json_schema(by_alias=True)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def sequences(body: InferBody, model: ServedModel, settings: Settings, arrived: float) -> tuple[Request, bytes]:
    """The request for the engine and its tensor bytes; raises InvalidInput or TooLarge naming the input at fault."""
    check_rows(len(body.inputs), settings)
    _check_session(body)
    arrays = [validation.array(value, body.field_of(index), model) for index, value in enumerate(body.inputs)]
    options = Options(
        returns=_returns(body, model.spec),
        deadline_ms=deadline_ms(body.deadline_ms, settings),
        priority=body.priority,
        session=body.session,
        starts=body.start,
        ends=body.end,
        exactly=body.version is not None,
    )
    return request([len(array) for array in arrays], options, model, arrived), b"".join(array.tobytes() for array in arrays)


def request(lengths: list[int], options: Options, model: ServedModel, arrived: float) -> Request:
    """What the engine is asked for sequences of so many steps, all of them checked."""
    return Request(
        model=model.spec.name,
        version=model.version,
        lengths=lengths,
        deadline=arrived + options.deadline_ms / 1000,
        sent=time.monotonic(),
        priority=options.priority,
        returns=options.returns,
        session=options.session,
        session_starts=options.starts,
        session_ends=options.ends,
        generation=model.generation,
        exactly=options.exactly,
    )


def check_rows(rows: int, settings: Settings, field: str = "inputs") -> None:
    """Whether one request may have so many sequences; raises TooLarge."""
    if rows > settings.max_inputs:
        raise TooLarge(
            f"{rows} inputs in one request and SEQSERVE_MAX_INPUTS is {settings.max_inputs}: "
            "send several requests, or raise SEQSERVE_MAX_INPUTS",
            field=field,
        )


def check_chunk(rows: int, field: str = "inputs") -> None:
    """Whether so many sequences can be a session's next chunk; raises InvalidInput."""
    if rows > 1:
        raise InvalidInput(f"{rows} inputs for one session: send its chunks one by one", field=field)


def deadline_ms(wanted: float | None, settings: Settings, field: str = "deadline_ms") -> float:
    """How long a caller waits, who may not have said it; raises InvalidInput."""
    if wanted is None:
        return settings.default_deadline_ms
    if wanted > settings.max_deadline_ms:
        raise InvalidInput(
            f"{field} is {wanted:g} milliseconds and SEQSERVE_MAX_DEADLINE_MS is {settings.max_deadline_ms}: ask for less",
            field=field,
        )
    return wanted


def returns(wanted: Iterable[str], spec: ModelSpec) -> Returns:
    """What the engine is asked for besides the head's answer, or because it is the head's answer."""
    names = {*wanted, spec.head.kind.replace("embed", "embedding")}
    return Returns(embedding="embedding" in names, sequence="sequence" in names)


def error_body(error: ServiceError) -> dict[str, str]:
    """{"error", "code"} and, where one field is at fault, "field"."""
    body = {"error": error.message, "code": error.code}
    return body | ({"field": error.field} if error.field else {})


def _check_session(body: InferBody) -> None:
    """Whether what is said of a session is said of one, and of one chunk of it."""
    if body.session is not None:
        check_chunk(len(body.inputs))
        return
    for field, said in (("start", body.start is not None), ("end", "end" in body.model_fields_set)):
        if said:
            raise InvalidInput(f"{field} is said of a session and none is named: name one with session", field=field)


def _returns(body: InferBody, spec: ModelSpec) -> Returns:
    """As above; raises InvalidInput for what the model has not."""
    for name, has in (("embedding", spec.has_embedding), ("sequence", spec.has_steps)):
        if name in body.returns and not has:
            raise InvalidInput(f"{spec.name} has no {name} to return: leave it out of return", field="return")
    return returns(body.returns, spec)


def _invalid(body: type[Body], error: Mapping[str, Any]) -> ServiceError:
    if error["type"] == "json_invalid":
        return InvalidRequest(f"{body.what} is not JSON: {shown(str(error['msg']))}")
    if not error["loc"]:
        return InvalidRequest(f"{body.what} is not an object: send {body.like}")
    name, *rest = error["loc"]
    field = shown(str(name)) + "".join(f"[{part}]" for part in rest if isinstance(part, int))
    if error["type"] == "extra_forbidden":
        return InvalidInput(f"{field} is no option of {body.of}: known are {', '.join(_names(body))}", field=field)
    if error["type"] == "missing":
        return InvalidInput(f"{field} is missing: {body.what} needs {' and '.join(_needed(body))}", field=field)
    return InvalidInput(f"{field}: {error['msg'][0].lower()}{error['msg'][1:]}", field=field)


def _invalid_query(query: type[Query], error: Mapping[str, Any]) -> ServiceError:
    field = shown(str(error["loc"][0]))
    if error["type"] == "extra_forbidden":
        return InvalidInput(f"{field} is no parameter of {query.of}: known are {', '.join(_names(query))}", field=field)
    if error["type"] == "missing":
        return InvalidInput(f"{field} is missing: {query.of} needs {' and '.join(_needed(query))}", field=field)
    return InvalidInput(f"{field} is {shown(str(error['input']))}: {error['msg'][0].lower()}{error['msg'][1:]}", field=field)


def _names(kind: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in kind.model_fields.items()]


def _needed(kind: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in kind.model_fields.items() if info.is_required()]
