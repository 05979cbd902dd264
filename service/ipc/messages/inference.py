"""Requests for inference, their answers, and the state of an engine."""

from __future__ import annotations

import msgspec

from service.ipc.messages.message import Message, Refusal
from service.ipc.messages.models import ModelKey

IDS = "int32"
"""Dtype of token ids between processes."""
FEATURES = "float32"
"""Dtype of features and of every floating-point output between processes."""
MAX_RUNS = 1024
"""Most batches in an answer: the first batches, and the last."""


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


class BatchRun(msgspec.Struct, array_like=True, frozen=True):
    """How an engine ran one batch. Moments are seconds on the machine's monotonic clock.

    `engine` is the number of the engine, and `number` is the number of the batch in it. `by` has the values of the metric `batches`.
    `formed`: its sequences were chosen; `staged`: they were packed; `started`: the device was free for it; `computed`: the layers had
    run; `ended`: the results were split.
    """

    engine: int
    device: str
    number: int
    sequences: int
    tokens: int
    padded_tokens: int
    by: str
    formed: float
    staged: float
    started: float
    computed: float
    ended: float


class SessionOptions(msgspec.Struct, array_like=True, frozen=True):
    """How chunks continue their sessions.

    `starts` is true to start the session, false to resume it, and None for either. `ends` closes it after this chunk. `exactly` is true
    when the client named the version; otherwise a session's own version is meant. Without `opens`, the chunk of a session that is not open
    is refused. `limit` is how many sessions the tenant may have open in one engine, 0 without a limit for tenants. `resubmitted` is true
    when another engine ended before it answered.
    """

    starts: bool | None = None
    ends: bool = False
    exactly: bool = True
    opens: bool = True
    limit: int = 0
    resubmitted: bool = False


ANY_SESSION = SessionOptions()


class BlockKey(msgspec.Struct, array_like=True, frozen=True, cache_hash=True):
    """What the requests of a block share. options: None without sessions. initial: whether they bring states."""

    model: ModelKey
    priority: int
    returns: Returns
    share: Share = NO_TENANT
    options: SessionOptions | None = None
    initial: bool = False


class RequestBlock(Message, frozen=True):
    """Requests of one loop tick with the same BlockKey, which is `key` in the encoding of `blocks.packed_key`.

    Their columns follow the message, end to end: ids (requests,) uint64; deadlines (requests,) float64, seconds on the machine's
    monotonic clock; counts (requests,) int32, the sequences of each request; lengths (sequences,) int32, the time steps of each
    sequence; and the values of all steps, (steps,) int32 ids or (steps, features) float32. `shortest` and `longest` are the steps of
    one sequence, `deadline` is the earliest, `sent` the mean of the moments on that clock at which the requests were sent. A request with
    a higher priority runs sooner. With `timed`, the answers tell how their batches ran.

    `sessions` names the session of each request, of which the request is the next chunk; it is empty if the requests have none. A request
    that only ends its session has one sequence without steps. `at` has the steps that each session has before the chunk according to the
    client, -1 if the client does not say; it is empty if no request says it.

    With `initial` in the key, the states from which the sequences start follow the values: (sequences, numbers) float32 in `state_bytes`
    bytes, joined in the order of the model's states. NaN stands for the number from which a sequence starts otherwise.
    """

    key: bytes
    requests: int
    sequences: int
    steps: int
    shortest: int
    longest: int
    deadline: float
    sent: float
    timed: bool = False
    sessions: list[str] = msgspec.field(default_factory=list)
    at: list[int] = msgspec.field(default_factory=list)
    state_bytes: int = 0


class Request(msgspec.Struct, array_like=True, frozen=True):
    """One client request, which leaves a frontend as a row of a RequestBlock.

    `lengths` are time steps per sequence. `deadline` and `sent` are seconds on the machine's monotonic clock. `session` is the session
    of which the sequence is the next chunk, and `session_at` as `at` of the block, None if the client does not say. `session_starts`,
    `session_ends`, `exactly`, `opens_session`, `session_limit` and `resubmitted` are its SessionOptions. `state_bytes` is the size of the
    states that follow its values. All others are as in the block.
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
    state_bytes: int = 0
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
    def initial(self) -> bool:
        """Whether it brings the states from which its sequences start."""
        return self.state_bytes > 0

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


class AnswerWithoutSteps(msgspec.Struct, array_like=True, frozen=True):
    """The answer of a model to one sequence without steps, with every vector that a request may ask for. data: the bytes of its arrays."""

    answer: Answer
    data: bytes


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


class EngineStatus(Message, frozen=True):
    """First message of an engine on a channel, sent again when its models change. `place` is its number, counted from 0."""

    models: list[LoadedModel]
    place: int = 0
    device: str = ""


class Answer(msgspec.Struct, array_like=True, frozen=True):
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
    steps: list[int] = msgspec.field(default_factory=list)
    session_steps: int = 0
    ready: float = 0.0
    finite: bool = True
    state: tuple[int, ...] = ()
    queued: float = 0.0
    runs: list[BatchRun] = msgspec.field(default_factory=list)


class AnswerBlock(Message, frozen=True):
    """The answers to requests of one RequestBlock: the shapes of an Answer, for all sequences of the requests together.

    Columns come first: ids (requests,) uint64, counts (requests,) int32 and steps (sequences,) int32, the steps of each sequence in
    per-step arrays; with `sessions` also the session_steps of an Answer, (requests,) int64. The arrays follow in the order of an Answer.
    `per_step` tells whether scores and picks have a line per step. `ready`, `queued`, `runs` and `finite` are alike in every Answer.
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
    runs: list[BatchRun] = msgspec.field(default_factory=list)
    state: tuple[int, ...] = ()
    finite: bool = True
    sessions: bool = False


class RefusalBlock(Message, frozen=True):
    """Requests of one RequestBlock that are refused for the same reason: their ids follow, (requests,) uint64."""

    refusal: Refusal


class Backlog(Message, frozen=True):
    """Predicted seconds of the work left in an engine, which counts the first `frames` frames of this channel."""

    seconds: float
    frames: int


class TrialBegan(Message, frozen=True):
    """The engine loads a version, or starts its first batch of a version. If the engine ends before TrialEnded, the version may be the
    cause."""

    key: ModelKey


class TrialEnded(Message, frozen=True):
    """The engine has survived a trial. ran: it was a batch, not the load."""

    key: ModelKey
    ran: bool
