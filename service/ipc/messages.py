"""The values that travel: one request on its way in, one answer on its way out.

They cross the process border as a msgspec body and trailing bytes. Nothing here knows HTTP, sockets or torch.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from service.errors import BY_CODE, InferenceFailed, ServiceError, SessionConflict

IDS = "int32"
"""Token ids travel as int32, feature rows as float32; answers as float32."""
FEATURES = "float32"
ZEROS, SCRAP, FIRST = 0, 1, 2
"""Places of states that belong to no sequence, and the first that does. Every sequence begins from ZEROS, which is never written; what
nobody goes on from is written to SCRAP, which is never read."""

DIGEST_BYTES = 16
"""Of the name of a session, where it is noted for the engine that comes after."""


class ModelKey(NamedTuple):
    """What a turn runs: one version of one model, and which of those that its folder has held one after the other."""

    name: str
    version: str
    generation: int = 0

    @property
    def labels(self) -> tuple[str, str]:
        """As the metrics have it."""
        return self.name, self.version


class Returns(msgspec.Struct, array_like=True, frozen=True):
    """What a caller wants besides the head's answer."""

    embedding: bool = False
    sequence: bool = False


class Request(msgspec.Struct, array_like=True, frozen=True):
    """The sequences of one call, laid end to end in the bytes that follow.

    `lengths` are steps per sequence, `deadline` and `sent` are seconds on this machine's monotonic clock, higher `priority`
    runs sooner. The trailing bytes are (tokens,) int32 ids or (tokens, features) float32 rows, as the model's input says.

    The one sequence of a request that names a `session` is its next chunk. `session_starts` says whether the session begins with it, goes
    on with it, or, None, whichever there is; `session_ends` that nothing comes after it. `exactly` says that the caller named the version:
    else the session's own is the one that is meant.
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

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.model, self.version, self.generation)


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Shapes of the arrays that follow, in this order, sequences laid end to end; the shape of what there is not is empty.

    `scores` float32 and `picks` int32 have a line for each sequence, or for each step, as the head does; `embedding` is (sequences,
    width) and `sequence` (steps, width) float32. `steps` counts each sequence's steps in what is given per step, `session_steps` those
    that a session has had, with this chunk of it.
    """

    scores: tuple[int, ...] = ()
    picks: tuple[int, ...] = ()
    embedding: tuple[int, ...] = ()
    sequence: tuple[int, ...] = ()
    steps: list[int] = []
    session_steps: int = 0


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A ServiceError on its way to who asked."""

    code: str
    message: str
    field: str | None = None
    retry_after: int | None = None
    elsewhere: ModelKey | None = None
    """Of a chunk whose session is of another version of its model: that one."""

    @classmethod
    def of(cls, error: ServiceError) -> Refusal:
        elsewhere = error.elsewhere if isinstance(error, SessionConflict) else None
        return cls(error.code, error.message, error.field, error.retry_after, elsewhere and ModelKey(*elsewhere))

    @property
    def error(self) -> ServiceError:
        """As it was raised elsewhere."""
        if self.elsewhere is not None:
            return SessionConflict(self.message, field=self.field, elsewhere=self.elsewhere)
        return BY_CODE.get(self.code, InferenceFailed)(self.message, field=self.field, retry_after=self.retry_after)


class Trace(msgspec.Struct, array_like=True, frozen=True):
    """What a front asks of an engine: to record its next `batches`, or what of them comes within so many `seconds`."""

    batches: int
    seconds: float


class LoadedModel(msgspec.Struct, array_like=True, frozen=True):
    """What the engine says of a model that it serves: which kernels run it, what it holds, whether its sequences may come in chunks, and
    what it costs: seconds of any turn, for each step of its longest sequence, and for each step of all.
    """

    name: str
    version: str
    device: str
    backends: list[str]
    weight_bytes: int
    streams: bool = False
    fixed: float = 0.0
    per_step: float = 0.0
    per_token: float = 0.0
    generation: int = 0

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.version, self.generation)

    def seconds(self, lengths: list[int]) -> float:
        """How long a request with sequences of these lengths is expected to take alone."""
        return self.fixed + self.per_step * max(lengths) + self.per_token * sum(lengths)


class ModelVersion(msgspec.Struct, array_like=True, frozen=True):
    """What the folder of one version held when it was read. spec: its model.toml, as JSON; generation: which of all that were read in the
    service's life, as the same folder may hold something else later."""

    name: str
    version: str
    generation: int
    folder: str
    spec: str

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.version, self.generation)


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    """All that is to be served, the versions of each model rising. aliases: other names, each for a model or for `model/version`."""

    model_versions: list[ModelVersion]
    aliases: dict[str, str]


class Closing(msgspec.Struct, array_like=True, frozen=True):
    """A version that is not served any more, and for how many seconds its sessions may go on."""

    key: ModelKey
    seconds: float


class IndexEntry(msgspec.Struct, array_like=True, frozen=True):
    """One version of a model in the models folder: READY, LOADING, UNLOADING or UNAVAILABLE, and the reason, where there is one."""

    name: str
    version: str
    state: str
    reason: str = ""


class EngineStatus(msgspec.Struct, array_like=True, frozen=True):
    """An engine's first word on a channel, and its word when this has changed: it is ready, for these models; which of the engines it is,
    counted from 0, and its device."""

    models: list[LoadedModel]
    place: int = 0
    device: str = ""
