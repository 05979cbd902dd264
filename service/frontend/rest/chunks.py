"""What a client says on /stream: the query of its handshake, its messages, and the requests that they become."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, structs
from pydantic import Field

from service.access.caller import Caller
from service.frontend.rest.infer import check_returns
from service.frontend.rest.schemas import JsonBody, QueryParameters, SessionId
from service.frontend.run.catalog import ServedModel
from service.frontend.run.runner import DecodedRequest
from service.frontend.run.validation import MAX_SESSION_STEPS, PackedInputs, check_empty_chunk, pack_input, resolve_deadline_ms
from service.ipc.blocks import block_key
from service.ipc.messages.inference import Request
from service.modeling.spec import ModelSpec
from service.settings import Settings

INPUT = "input"
"""The member of a message that has the chunk."""


class StreamQuery(QueryParameters):
    """Query parameters of /stream: the options that all chunks of a socket share."""

    endpoint = "/stream"

    model: str
    """Name or alias of a served model."""
    version: str | None = None
    """Version of the model; the newest by default."""
    session: SessionId | None = None
    """Id of a session that stays open when the socket closes. By default a new session opens and closes with the socket."""
    returns: list[Literal["embedding", "sequence"]] = Field([], alias="return")
    """Adds vectors to each reply: the pooled vector (embedding) or the vector of every step (sequence). Repeat the parameter for both,
    or separate the names with commas."""
    deadline_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Milliseconds from a chunk's arrival after which its reply is useless to the client."""
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    """A request with a higher priority runs sooner."""

    @classmethod
    def collect(cls, items: Iterable[tuple[str, str]]) -> dict[str, Any]:
        pairs = list(items)
        returns = [part for name, value in pairs if name == "return" for part in value.split(",")]
        return dict(pairs) | ({"return": returns} if returns else {})

    def check_options(self, spec: ModelSpec, settings: Settings) -> None:
        """Raise the ServiceError of options that every chunk would be refused for."""
        check_returns(self.returns, spec)
        resolve_deadline_ms(self.deadline_ms, settings)


class ChunkBody(JsonBody):
    """One text message on /stream."""

    endpoint = "a message on /stream"
    noun = "the message"
    example = '{"input": ...}'

    input: Any
    """The next chunk: a string, a list of token ids, or a list of steps with a list of floats each, depending on the model."""
    start: bool | None = None
    """true restarts the session with this chunk; false only continues an open session."""
    end: bool = False
    """true closes the session after this chunk, which may be empty; the next chunk starts it again."""
    steps: Annotated[int, Meta(ge=0, le=MAX_SESSION_STEPS)] | None = None
    """How many steps the session has before this chunk. A chunk that finds another number is refused."""


def chunk_field(index: int) -> str:
    """Return the name of a message's only input in error messages."""
    assert index == 0
    return INPUT


class DecodedChunk(DecodedRequest, frozen=True):
    """A message. The context has the options of its socket; the other fields are as in ChunkBody."""

    input: Any = None
    start: bool | None = None
    end: bool = False
    steps: int | None = None


NO_CHUNK = DecodedChunk("", None, None)


class ChunkOptions:
    """What all chunks of a socket share."""

    def __init__(self, query: StreamQuery, session: str, settings: Settings) -> None:
        """query: checked with `check_options`."""
        self._query = query
        self._session = session
        self.session_json = orjson.dumps(session)
        self.prepared: tuple[ServedModel, Caller] | None = None
        """For which model and caller `continuing` may be called."""
        self._seconds = resolve_deadline_ms(query.deadline_ms, settings) / 1000
        self.decoded = query.model, query.version, self, session, None, False
        """The first values of each DecodedChunk."""

    def prepare(self, model: ServedModel, caller: Caller) -> None:
        """Prepare the requests that continue the session; raises a ServiceError."""
        request = caller.admit(self._continuing(model))
        values = structs.astuple(request)
        self.block, self._first, self._last = block_key(request), values[:2], values[5:-2]
        self.prepared = model, caller

    def continuing(self, steps: int, session_at: int | None, arrived: float, sent: float) -> Request:
        """Return the request of a chunk that continues the session, as its caller may send it."""
        values = *self._first, [steps], arrived + self._seconds, sent, *self._last, session_at
        return Request(*values)

    def request(
        self, chunk: DecodedChunk, model: ServedModel, arrived: float, packed: PackedInputs | None
    ) -> tuple[Request, bytes | memoryview]:
        """Return the engine's request and its tensor bytes; raises the ServiceError of a chunk that the model does not take."""
        if packed is None:
            data: bytes | memoryview = pack_input(chunk.input, INPUT, model)
            steps = len(data) // model.step_bytes
        else:
            data, [steps] = packed.data, packed.lengths
        start = chunk.start
        if not steps:
            check_empty_chunk(start, chunk.end, INPUT)
            start = False
        deadline, sent = arrived + self._seconds, time.monotonic()
        options = {"session_starts": start, "session_ends": chunk.end, "session_at": chunk.steps}
        return structs.replace(self._continuing(model), lengths=[steps], deadline=deadline, sent=sent, **options), data

    def _continuing(self, model: ServedModel) -> Request:
        """Return a request that continues the session, without steps; raises InvalidInput."""
        query, returns = self._query, check_returns(self._query.returns, model.spec)
        of_session = self._session, False, False, model.generation, query.version is not None
        return Request(model.spec.name, model.version, [], 0.0, 0.0, query.priority, returns, *of_session)


def resolve_start(start: bool | None, *, begun: bool) -> bool | None:
    """Return `start` of a chunk. Once the session has begun, a chunk without `start` only continues it."""
    return False if start is None and begun else start
