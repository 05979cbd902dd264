"""Every message between processes: one tagged struct each. A receiver chooses the handler by the type of the message.

A message travels in a frame (`channel.py`), which also has an id and, for tensors and states, trailing bytes. A call and its reply have the
same id (`rpc.py`), and so have a request and its answer. Nothing here knows HTTP, sockets or torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from service.errors import BY_CODE, InferenceFailed, ServiceError, SessionConflict
from service.ipc.session_file import StateOrigin, StoredTensor
from service.metrics import Snapshot

IDS = "int32"
"""Dtype of token ids between processes."""
FEATURES = "float32"
"""Dtype of features and of every floating-point output between processes."""

MAX_RUNS = 1024
"""Most batches in an answer: the first batches, and the last."""
DIGEST_BYTES = 16
"""Size of a session id's digest in the session journal."""


RESERVED_SESSION_PREFIX = "stream:"
"""Session ids that the service creates begin with this; clients may not use it."""
TENANT_END = "\x1f"
"""Separates a tenant from the id of its session."""


def session_of_tenant(tenant: str, id: str) -> str:
    """Return the name of a session in the engines. tenant: empty in a service without keys."""
    return f"{tenant}{TENANT_END}{id}" if tenant else id


def session_tenant(name: str) -> str:
    """Return the tenant of a session, empty without keys."""
    return name.rpartition(TENANT_END)[0]


def session_id(name: str) -> str:
    """Return the id that a client gave to a session."""
    return name.partition(TENANT_END)[2] or name


class ModelKey(NamedTuple):
    """Identifies what a batch runs: one version of one model. `generation` tells apart successive contents of its folder."""

    name: str
    version: str
    generation: int = 0

    @property
    def labels(self) -> tuple[str, str]:
        """Return the metric labels: name and version."""
        return self.name, self.version


# Values inside messages.


class Returns(msgspec.Struct, array_like=True, frozen=True):
    """Outputs that a request asks for in addition to the outputs of the model's head."""

    embedding: bool = False
    sequence: bool = False
    state: bool = False


class Share(msgspec.Struct, array_like=True, frozen=True):
    """Tenants share the time of an engine by weight. tenant: empty in a service without keys."""

    tenant: str = ""
    weight: float = 1.0


NO_TENANT = Share()


class AnswerWithoutSteps(msgspec.Struct, array_like=True, frozen=True):
    """The answer of a model to one sequence without steps, with every vector that a request may ask for. data: the bytes of its arrays."""

    answer: Answer
    data: bytes


class BatchRun(msgspec.Struct, array_like=True, frozen=True):
    """How an engine ran one batch. Moments are seconds on the machine's monotonic clock.

    `engine` is the number of the engine and `number` that of the batch in it. `by_graph` is true if one CUDA graph ran the batch.
    `formed`: its sequences were chosen; `staged`: they were packed; `started`: the device was free for it; `computed`: the layers had
    run; `ended`: the results were split.
    """

    engine: int
    device: str
    number: int
    sequences: int
    tokens: int
    padded_tokens: int
    by_graph: bool
    formed: float
    staged: float
    started: float
    computed: float
    ended: float


class LoadedModel(msgspec.Struct, array_like=True, frozen=True):
    """A model version that an engine serves: its kernels and cost.

    `streams` is true when a sequence may arrive in chunks. A batch takes `fixed` seconds, plus `per_step` for each time step of its longest
    sequence, plus `per_token` for each token. `without_steps` is None for a model that needs a step.
    """

    name: str
    version: str
    device: str
    backends: list[str]
    streams: bool = False
    fixed: float = 0.0
    per_step: float = 0.0
    per_token: float = 0.0
    generation: int = 0
    without_steps: AnswerWithoutSteps | None = None

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.version, self.generation)

    def seconds(self, lengths: list[int]) -> float:
        """Return the predicted compute time of a request with sequences of these lengths, alone in its batch."""
        return self.fixed + self.per_step * max(lengths) + self.per_token * sum(lengths)


class ModelVersion(msgspec.Struct, array_like=True, frozen=True):
    """One version of a model as its folder was when it was read. `spec` is its model.toml as JSON."""

    name: str
    version: str
    generation: int
    folder: str
    spec: str

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.version, self.generation)


READY, LOADING, UNLOADING, UNAVAILABLE = "READY", "LOADING", "UNLOADING", "UNAVAILABLE"
"""States of a version in the models folder."""


class IndexEntry(msgspec.Struct, array_like=True, frozen=True):
    """One version in the models folder. `state` is READY, LOADING, UNLOADING or UNAVAILABLE; `reason` explains it
    where known.

    `version` is empty for a model without a readable version.
    """

    name: str
    version: str
    state: str
    reason: str = ""


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    """Everything to serve, the versions of each model in ascending order. An alias names a model or `model/version`.

    `unavailable` has the versions that should be served and cannot be, each with the reason.
    """

    model_versions: list[ModelVersion]
    aliases: dict[str, str]
    unavailable: list[IndexEntry] = []


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all messages."""


# Frontend to engine.


class RequestBlock(Message, frozen=True):
    """Requests without a session of one loop tick, for one model version, of one tenant, with one priority and the same outputs.

    Their columns follow the message, end to end: ids (requests,) uint64; deadlines (requests,) float64, seconds on the machine's
    monotonic clock; counts (requests,) int32, the sequences of each request; lengths (sequences,) int32, the time steps of each
    sequence; and the values of all steps, (steps,) int32 ids or (steps, features) float32. `shortest` and `longest` are the steps of
    one sequence, `deadline` is the earliest, `sent` the mean of the moments on that clock at which the requests were sent. A higher
    `priority` runs sooner. With `timed`, the answers tell how their batches ran.
    """

    model: str
    version: str
    generation: int
    requests: int
    sequences: int
    steps: int
    shortest: int
    longest: int
    deadline: float
    sent: float
    priority: int
    returns: Returns
    share: Share = NO_TENANT
    timed: bool = False

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.model, self.version, self.generation)


class Request(Message, frozen=True):
    """The sequences of one client request.

    Their values follow the message, packed end to end: (tokens,) int32 ids or (tokens, features) float32.
    `lengths` are time steps per sequence. `deadline` and `sent` are seconds on the machine's monotonic clock. A higher `priority` runs
    sooner.

    With `session`, the sequence is the next chunk of that session. `session_starts` is true to start it, false to resume it, and None
    for either. `session_ends` closes it after this chunk. `session_at` is how many steps the session has before this chunk according to
    the client, None if the client does not say. `exactly` is true when the client named the version; otherwise a session's own version is
    meant. `resubmitted` is true when another engine ended before it answered. `session_limit` is how many sessions its
    tenant may have open in one engine, 0 without a limit for tenants.

    With `initial`, the values are followed by the state from which each sequence starts, (sequences, numbers) float32, joined in the
    order of the model's states. NaN stands for the number from which a sequence starts otherwise.

    With `timed`, the answer tells how its batches ran. Without `opens_session`, the chunk of a session that is not open is refused.
    """

    model: str
    version: str
    lengths: list[int]
    deadline: float
    sent: float
    priority: int = 0
    returns: Returns = Returns()
    session: str | None = None
    session_starts: bool | None = None
    session_ends: bool = False
    generation: int = 0
    exactly: bool = True
    resubmitted: bool = False
    session_limit: int = 0
    share: Share = NO_TENANT
    initial: bool = False
    timed: bool = False
    session_at: int | None = None
    opens_session: bool = True

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.model, self.version, self.generation)

    @property
    def ends_only(self) -> bool:
        """Whether it ends its session without another step. Its answer has no outputs."""
        return self.session_ends and self.session is not None and self.lengths == [0]

    @property
    def has_states(self) -> bool:
        """Whether it brings states or asks for them."""
        return self.initial or self.returns.state


class Cancel(Message, frozen=True):
    """Nothing waits any longer for the request or call with this id."""


class Release(Message, frozen=True):
    """This frontend sends no further requests for a model version."""

    key: ModelKey


class RecordTrace(Message, frozen=True):
    """Call: record the next batches of the engine, up to `batches` within `seconds`. The reply's tail holds trace events as JSON."""

    batches: int
    seconds: float


class ExportSession(Message, frozen=True):
    """Call: return the state of a session in the reply's trailing bytes."""

    session: str


class ImportSession(Message, frozen=True):
    """Call: open a session with a state from `origin`. The bytes of its tensors are the trailing bytes."""

    session: str
    origin: StateOrigin
    tensors: dict[str, StoredTensor]
    session_limit: int = 0


class EndSession(Message, frozen=True):
    """Call: end a session."""

    session: str


class FindSession(Message, frozen=True):
    """Call: return the model version of a session. The reply is SessionFound."""

    session: str


# Engine to frontend.


class EngineStatus(Message, frozen=True):
    """First message of an engine on a channel, sent again when its models change. `place` is its number, counted from 0."""

    models: list[LoadedModel]
    place: int = 0
    device: str = ""


class Answer(Message, frozen=True):
    """Shapes of the arrays that follow, in this order; an absent array has an empty shape. Sequences are packed end to end.

    `scores` float32 and `picks` int32 have one line per sequence or per time step, as the head decides. `embedding` is (sequences, width)
    and `sequence` (tokens, width), both float32. `state`, the last array, has the states after each sequence, (sequences, numbers) float32,
    joined in the order of the model's states. `steps` counts the steps of each sequence in per-step arrays. `session_steps` counts all
    steps of the session, this chunk included. `ready` is when the engine had the results, on the machine's monotonic clock. `finite` is
    false, and there are no arrays, if the chunk of a session led to values that are not finite: the session is then unchanged.

    If the request is `timed`, `queued` is when the engine queued it, and `runs` has the batches that ran its steps, at most MAX_RUNS.
    """

    scores: tuple[int, ...] = ()
    picks: tuple[int, ...] = ()
    embedding: tuple[int, ...] = ()
    sequence: tuple[int, ...] = ()
    steps: list[int] = []
    session_steps: int = 0
    ready: float = 0.0
    finite: bool = True
    state: tuple[int, ...] = ()
    queued: float = 0.0
    runs: list[BatchRun] = []


class AnswerBlock(Message, frozen=True):
    """The answers to requests of one RequestBlock: the shapes of an Answer, for all sequences of the requests together.

    Columns come first: ids (requests,) uint64, counts (requests,) int32 and steps (sequences,) int32, the steps of each sequence in
    per-step arrays. The arrays follow in the order of an Answer. `per_step` tells whether scores and picks have a line per step. `ready`,
    `queued` and `runs` are alike in every Answer.
    """

    requests: int
    sequences: int
    scores: tuple[int, ...] = ()
    picks: tuple[int, ...] = ()
    embedding: tuple[int, ...] = ()
    sequence: tuple[int, ...] = ()
    per_step: bool = False
    ready: float = 0.0
    queued: float = 0.0
    runs: list[BatchRun] = []


class RefusalBlock(Message, frozen=True):
    """Requests of one RequestBlock that are refused for the same reason: their ids follow, (requests,) uint64."""

    refusal: Refusal


class Backlog(Message, frozen=True):
    """Predicted seconds of the work left in an engine, which counts the first `frames` frames of this channel."""

    seconds: float
    frames: int


# Engine to the supervisor and to the frontends.


class TrialBegan(Message, frozen=True):
    """The engine loads a version, or starts its first batch of a version. If the engine ends before TrialEnded, the version may be the
    cause."""

    key: ModelKey


class TrialEnded(Message, frozen=True):
    """The engine has survived a trial. ran: it was a batch, not the load."""

    key: ModelKey
    ran: bool


# Between an engine and the session store.


class TakeOutcome(StrEnum):
    """The outcome of a TakeSession.

    NEW: this replica owns the session, which begins. TAKEN: it owns the session, whose state follows. ABSENT: there is no session of this
    name. ENDED: the session ended without its client's knowledge. HELD: another replica has it. NEWER: a later version of the service
    saved it. AWAY: the store does not answer, or the owner does not let go.
    """

    NEW = "new"
    TAKEN = "taken"
    ABSENT = "absent"
    ENDED = "ended"
    HELD = "held"
    NEWER = "newer"
    AWAY = "away"


class TakeSession(Message, frozen=True):
    """This replica wants to own a session.

    turn: names the ownership, if the replica gets it; no other ownership has this number. begun: when the session begins, if it does, in
    milliseconds of Unix time. begins: whether it may begin. replaces: if the session still has this turn, it begins again without a state.
    """

    session: str
    turn: int
    begun: int
    begins: bool
    replaces: int = 0


class SessionTaken(Message, frozen=True):
    """The outcome of a TakeSession, never HELD. With TAKEN, the state is in the trailing bytes as a session file.

    begun: when the session began. exact: no chunk was answered after this state. ended: why the session ended.
    """

    session: str
    outcome: TakeOutcome
    begun: int = 0
    exact: bool = False
    ended: str = ""


class SaveSession(Message, frozen=True):
    """The state of a session as a session file in the trailing bytes. It is saved if `turn` still names the ownership of the session.

    exact: no chunk was answered after this state. releases: the session is then free for other replicas, and SaveEnded follows. anew: the
    session began while the store was away, and also replaces a session that began earlier. again: it may have been made before.
    """

    session: str
    turn: int
    begun: int
    exact: bool = False
    releases: bool = False
    anew: bool = False
    again: bool = False


class SaveEnded(Message, frozen=True):
    """The end of a SaveSession with `releases` or `anew`, or that was refused: `owned` is then false, the ownership has ended.

    turn, releases: as in the SaveSession. failed: the state was not saved.
    """

    session: str
    turn: int
    owned: bool
    releases: bool
    failed: bool = False


class ReleaseSession(Message, frozen=True):
    """The engine does not hold this session: others may take its saved state, if it has one.

    turn: of the ownership that ends, or 0 for any of this replica: without a state, its session is lost. exact: as the state was taken.
    """

    session: str
    turn: int = 0
    exact: bool = False


class DropSession(Message, frozen=True):
    """The session has ended, and with it the ownership `turn`. ended: why, if its client does not know."""

    session: str
    turn: int
    ended: str = ""


class SessionWanted(Message, frozen=True):
    """Another replica needs this session: save it and let go of it."""

    session: str


class VerifySession(Message, frozen=True):
    """Another replica may have taken over this session: save it, which is then refused."""

    session: str


class ReleaseSessions(Message, frozen=True):
    """Call: save up to `limit` sessions, and let go of them. The reply is SessionsLeft."""

    limit: int


class FlushSessions(Message, frozen=True):
    """Call of the supervisor: save all sessions and let go of them, within `seconds`."""

    seconds: float


# Supervisor to child, and back.


class Attach(Message, frozen=True):
    """The socket that comes with this frame is a channel to a process of another kind. store: to the session store, not to a frontend."""

    store: bool = False


class Ready(Message, frozen=True):
    """The child is ready to serve."""


class Failed(Message, frozen=True):
    """The child cannot start."""

    reason: str


class NotLoaded(Message, frozen=True):
    """The child starts without a model version, for this reason. `code` is that of the error."""

    key: ModelKey
    code: str
    reason: str


class Drain(Message, frozen=True):
    """The service is about to stop: report not ready."""


class CollectMetrics(Message, frozen=True):
    """Call to any child: return its metrics. The reply is MetricsCollected."""


class PrepareModel(Message, frozen=True):
    """Call to any child: make a model version ready to serve."""

    model_version: ModelVersion


class ServeModels(Message, frozen=True):
    """Call to a frontend: route requests by this manifest from now on."""

    manifest: Manifest


class CloseModel(Message, frozen=True):
    """Call to an engine: unload a version once nothing uses it. Its sessions may continue for `seconds`."""

    key: ModelKey
    seconds: float


class ForgetModel(Message, frozen=True):
    """To a frontend: no process has this version any longer."""

    key: ModelKey


class ScrapeMetrics(Message, frozen=True):
    """Call to the supervisor: return the metrics of all processes. The reply is MetricsCollected."""


class ListModels(Message, frozen=True):
    """Call to the supervisor: return every version in the models folder. The reply is ModelsListed."""


MAX_POLICY_CHARACTERS = 1000
"""Longest version policy of a LoadModel message."""


class LoadModel(Message, frozen=True):
    """Call to the supervisor: serve the current content of a model's folder, versions chosen by `policy` or by the folder's own policy."""

    name: str
    policy: str | None = None


class UnloadModel(Message, frozen=True):
    """Call to the supervisor: stop serving a model."""

    name: str


# Frontend to the tracer.


class Api(StrEnum):
    """The APIs of inference."""

    INFER = "infer"
    STREAM = "stream"
    OIP = "oip"
    GRPC = "grpc"
    GRPC_STREAM = "grpc_stream"


class RequestTrace(Message, frozen=True):
    """A request that ended, from which the tracer makes spans. Moments are seconds on the machine's monotonic clock.

    `trace`, `span` and `parent` are ids in hexadecimal digits; without a `parent` the request begins its trace. `state` is the client's
    tracestate, `status` the code that the client got. `failed` is true if the service is responsible for the outcome.

    `sent`: the request left for an engine; `received`: its answer arrived; `ended`: the reply was written. Moments that a request did
    not reach are 0. `ready`, `queued` and `runs` come from its Answer.
    """

    trace: str
    span: str
    parent: str
    state: str
    request_id: str
    api: Api
    outcome: str
    status: str
    failed: bool
    caller: str
    model: str
    version: str
    sequences: int
    tokens: int
    arrived: float
    sent: float
    received: float
    ready: float
    ended: float
    queued: float
    runs: list[BatchRun]


# Frontend to its decoder.


class DefineModel(Message, frozen=True):
    """A model version whose inputs follow. `spec` is its model.toml as JSON; the trailing bytes are its tokenizer.json, if it has one."""

    version: str
    generation: int
    spec: str


class DecodeBody(Message, frozen=True):
    """Call: parse the body in the trailing bytes, of a request to `api`. The reply is BodyDecoded.

    The decoder keeps the inputs until it receives a Cancel with the id of this call. session: named by the header, for POST /infer. The
    other fields are for the Open Inference Protocol over REST.
    """

    api: str
    header_length: int | None = None
    model: str = ""
    version: str = ""
    session: str | None = None


class PackInputs(Message, frozen=True):
    """Call: validate the inputs of a decoded body for a model. The reply is InputsPacked."""

    body: int
    key: ModelKey


# Replies to calls.


class Reply(Message, frozen=True):
    """Base of all replies to calls."""


class Done(Reply, frozen=True):
    """The call succeeded; its result, if any, is in the trailing bytes."""


class Refusal(Reply, frozen=True):
    """A ServiceError instead of a result."""

    code: str
    message: str
    field: str | None = None
    retry_after: int | None = None
    session_model: ModelKey | None = None
    """Model version of the session, when the request is for another version of that model."""
    steps: int | None = None

    @classmethod
    def of(cls, error: ServiceError) -> Refusal:
        elsewhere = error.elsewhere if isinstance(error, SessionConflict) else None
        key = elsewhere and ModelKey(*elsewhere)
        return cls(error.code, error.message, error.field, error.retry_after, key, error.steps)

    @property
    def error(self) -> ServiceError:
        """Return the error as the sender raised it."""
        if self.session_model is not None:
            return SessionConflict(self.message, field=self.field, elsewhere=self.session_model)
        kind = BY_CODE.get(self.code, InferenceFailed)
        return kind(self.message, field=self.field, retry_after=self.retry_after, steps=self.steps)


class SessionFound(Reply, frozen=True):
    """Model version of a session; None when no such session is open."""

    key: ModelKey | None


class SessionsLeft(Reply, frozen=True):
    """How many sessions this engine still holds."""

    sessions: int


class BodyDecoded(Reply, frozen=True):
    """Everything but the inputs of a body is in the trailing bytes. `body` identifies the inputs."""

    body: int


class InputsPacked(Reply, frozen=True):
    """Number of time steps of each input. The inputs follow, packed end to end, and with `has_states` the states as in `Request`."""

    lengths: list[int]
    has_states: bool = False


class MetricsCollected(Reply, frozen=True):
    """Metrics of one process, or of all."""

    snapshot: Snapshot


class ModelsListed(Reply, frozen=True):
    """Every version in the models folder."""

    entries: list[IndexEntry]


def _concrete(base: type[Message]) -> list[type[Message]]:
    return [kind for child in base.__subclasses__() for kind in ([child] if child is not Reply else _concrete(child))]


ALL = tuple(_concrete(Message))
"""Every message type."""
