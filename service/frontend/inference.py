"""Answers requests for every API: counts a request, finds its model, builds the engine's request, submits it. Knows no protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import random
from typing import Protocol

import msgspec

from service.access.caller import NO_QUOTAS, Caller
from service.access.policy import AccessPolicy
from service.access.refused_keys import RefusedKeys
from service.access.state_keys import StateKeys
from service.errors import (
    SERVICE_FAILED,
    InferenceFailed,
    InvalidInput,
    ServiceError,
    SessionConflict,
    TooLarge,
    Unavailable,
)
from service.frontend.body_budget import MAX_RECEIVING_BYTES, BodyBudget
from service.frontend.catalog import Catalog, ServedModel
from service.frontend.decoder.client import BodyDecoder
from service.frontend.dispatch.connection import Answered, PendingRequest, Receiver
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.large_answers import LargeAnswers
from service.frontend.memory_guard import MemoryGuard, trim_heap
from service.frontend.observation import EndedRequest, Observation, Observer, stage_seconds
from service.frontend.open_streams import OpenStreams
from service.frontend.origin import Identity, RequestIds
from service.frontend.quotas import QuotaLedger
from service.frontend.reading_turns import ReadingTurns
from service.frontend.retry_budget import RetryBudget
from service.frontend.start_queue import StartQueue
from service.frontend.tls import TlsContexts
from service.ipc.messages import Answer, Api, IndexEntry, Manifest, ModelKey, Request
from service.ipc.quota_counts import QuotaCounts
from service.ipc.trace_socket import TraceWriter
from service.log import Log
from service.memory_limit import MemoryLimit
from service.metrics import CUT_OFF, GONE, OK, Metrics, Snapshot
from service.settings import Settings

MAX_ATTEMPTS = 3
"""A chunk is submitted at most this many times, each time to the version that its session belonged to at the last attempt."""
UNKNOWN_MODEL_LABELS = ("unknown", "unknown")
"""Metric labels of a request that names no served model."""


class ClientDisconnected(Exception):
    """The client closed the connection before the reply."""


class SupervisorClient(Protocol):
    """The calls that a frontend makes to the supervisor."""

    async def scrape(self) -> Snapshot:
        """Return the metrics of all processes."""

    async def index(self) -> list[IndexEntry]:
        """Return every version in the models folder, served or not."""

    async def load(self, name: str, policy: str | None = None) -> None:
        """Serve the current content of a model's folder, with its own version policy or with `policy`, and return when it is served.

        Raises a ServiceError when that fails; the versions that were served before stay served.
        """

    async def unload(self, name: str) -> None:
        """Stop serving a model, and return when no request can find it any more. Raises UnknownModel."""


@dataclass(slots=True)
class Frontend:
    """The state that all APIs of one frontend share. `draining` is true during shutdown. Without `traces` nothing is traced."""

    settings: Settings
    catalog: Catalog
    dispatcher: Dispatcher
    metrics: Metrics
    log: Log
    supervisor: SupervisorClient
    quota_counts: QuotaCounts = field(default_factory=QuotaCounts.private)
    traces: TraceWriter | None = None
    draining: bool = False
    access: AccessPolicy = field(init=False)
    quotas: QuotaLedger = field(init=False)
    retries: RetryBudget = field(init=False)
    turns: ReadingTurns = field(init=False)
    starts: StartQueue = field(init=False)
    streams: OpenStreams = field(init=False)
    refused_keys: RefusedKeys = field(init=False)
    state_keys: StateKeys = field(init=False)
    tls: TlsContexts = field(init=False)
    memory: MemoryGuard = field(init=False)
    bodies: BodyBudget = field(init=False)
    decoder: BodyDecoder = field(init=False)
    large_answers: LargeAnswers = field(init=False)
    statistics: tuple[Snapshot, dict[object, bytes]] = ({}, {})
    """The newest metrics from which statistics were made, and these statistics by their form."""
    request_ids: RequestIds = field(init=False)
    observer: Observer = field(init=False)

    def __post_init__(self) -> None:
        self.access = AccessPolicy(self.settings)
        self.quotas = QuotaLedger(self.quota_counts, self.metrics)
        self.retries = RetryBudget(self.metrics)
        self.turns = ReadingTurns()
        self.starts = StartQueue(self.settings.default_deadline_ms, self.turns)
        self.streams = OpenStreams(self.access)
        self.refused_keys = RefusedKeys()
        self.state_keys = StateKeys(self.settings)
        self.tls = TlsContexts(self.settings)
        self.memory = MemoryGuard(self.settings.max_memory_share, MemoryLimit().read, self.metrics, self.log, trim_heap)
        self.bodies = BodyBudget(MAX_RECEIVING_BYTES, self.memory)
        self.large_answers = LargeAnswers()
        self.decoder = BodyDecoder(self.settings, self.bodies, self.memory, self.log)
        self.request_ids = RequestIds()
        self.observer = Observer(self.settings, self.log, self.metrics, self.traces)

    @property
    def ready(self) -> bool:
        return self.dispatcher.ready and not self.draining

    def check_ready(self) -> None:
        """Raise Unavailable unless requests are answered now."""
        if not self.ready:
            reason = "the service is shutting down" if self.draining else "no engine is ready"
            raise Unavailable(f"not ready: {reason}; retry later", retry_after=1)

    def serve(self, manifest: Manifest) -> None:
        """Serve the versions of this manifest instead of the current versions. The catalog must know all of them."""
        keys = [version.key for version in manifest.model_versions]
        retired = self.catalog.serve(keys, manifest.aliases, manifest.unavailable)
        self.metrics.start(model.key.labels for model in self.catalog.served)
        for key in retired:
            self.dispatcher.release(key)

    def send(self, caller: Caller, request: Request, data: bytes | memoryview, receiver: Receiver) -> PendingRequest:
        """Send a request that the caller may send, as `Dispatcher.send` does; raises QuotaExceeded, and Overloaded if memory is short."""
        if caller.quotas == NO_QUOTAS and not (caller.key or self.memory.limited):
            return self.dispatcher.send(request, data, receiver)
        request, end = self._begin(caller, request, len(data))
        try:
            return self.dispatcher.send(request, data, receiver, on_end=end)
        except ServiceError:
            if end is not None:
                end()
            raise

    async def submit(self, caller: Caller, request: Request, data: bytes | memoryview) -> Answered:
        """Return the answer to a request that the caller may send; raises a ServiceError."""
        request, end = self._begin(caller, request, len(data))
        if end is None:
            return await self.dispatcher.submit(request, data)
        try:
            return await self.dispatcher.submit(request, data)
        finally:
            end()

    def _begin(self, caller: Caller, request: Request, size: int) -> tuple[Request, Callable[[], None] | None]:
        """Count a request with `size` bytes of values. Return it as the engine may run it, and what must be called once at its end."""
        if caller.key:
            self.metrics.key_requests.add(caller.share.tenant, caller.name)
            self.metrics.key_tokens.add(caller.share.tenant, caller.name, by=sum(request.lengths))
        end = self.quotas.begin(caller, len(request.lengths), size) if caller.quotas != NO_QUOTAS else None
        if not self.memory.limited:
            return request, end
        numbers = 0
        key = request.key
        if key in self.catalog:  # a version that was forgotten while a body was parsed is refused later
            numbers = self.catalog[key].answer_numbers(sum(request.lengths), sequence=request.returns.sequence)
        try:
            request, release = self.memory.admit(request, size, numbers)
        except ServiceError:
            if end is not None:
                end()
            raise
        return request, release if end is None else _both(end, release)

    def forget(self, key: ModelKey) -> None:
        """Drop a version that no engine and no session uses any more, with its metric labels."""
        self.catalog.forget(key)
        if not any(model.key.labels == key.labels for model in self.catalog.served):
            self.metrics.forget(*key.labels)

    def internal_error(self, error: Exception) -> InferenceFailed:
        """Log an unexpected exception, and return the error for the client, which contains no detail."""
        self.log.capped("error", "bug", error=f"{type(error).__name__}: {error}")
        failure = InferenceFailed(SERVICE_FAILED)
        failure.in_frontend = True
        return failure


@dataclass(slots=True)
class TrackedRequest:
    """One request in the metrics, in the log and in traces. EndedRequest explains the fields."""

    arrived: float
    caller: Caller
    labels: tuple[str, str] = UNKNOWN_MODEL_LABELS
    outcome: str = OK
    timed: bool = False
    """Whether the client asks for the time in each stage."""
    observation: Observation | None = None
    sent: float = 0.0
    received: float = 0.0
    lengths: Sequence[int] = ()
    answer: Answer | None = None

    def stages(self) -> dict[str, float]:
        """Return the seconds in each stage until now."""
        return stage_seconds(self.arrived, self.sent, self.received, time.monotonic(), self.answer)

    def report(self, observer: Observer, api: Api, identity: Identity, ended: float) -> None:
        """Log and trace the request, which has ended."""
        request = EndedRequest(
            api,
            identity,
            self.caller.name,
            self.labels,
            self.outcome,
            self.arrived,
            self.sent,
            self.received,
            ended,
            self.lengths,
            self.answer,
        )
        observer.end(self.observation, request)


@contextmanager
def track_request(frontend: Frontend, arrived: float, caller: Caller, api: Api, identity: Identity) -> Iterator[TrackedRequest]:
    """Count a request as in flight, and at its end under exactly one outcome. Exceptions pass through."""
    metrics, observer = frontend.metrics, frontend.observer
    tracked = TrackedRequest(arrived, caller)
    if observer.chooses:
        tracked.observation = observer.begin(identity, random())
    metrics.accepted.add()
    metrics.in_flight.add()
    try:
        yield tracked
        frontend.retries.answered += 1
    except ServiceError as error:
        tracked.outcome = error.code
        frontend.retries.charge(error)
        raise
    except ClientDisconnected:
        tracked.outcome = GONE
        raise
    except asyncio.CancelledError:
        tracked.outcome = CUT_OFF
        raise
    except Exception:
        tracked.outcome = InferenceFailed.code
        raise
    finally:
        ended = time.monotonic()
        metrics.in_flight.add(by=-1)
        count_end(metrics, tracked.labels, tracked.outcome, ended - tracked.arrived)
        if observer.chooses or observer.times_all or tracked.outcome != OK:
            tracked.report(observer, api, identity, ended)


def count_end(metrics: Metrics, labels: tuple[str, str], outcome: str, seconds: float) -> None:
    """Count a request that ended `seconds` after its arrival."""
    metrics.requests.add(*labels, outcome)
    metrics.stage_seconds.observe(seconds, *labels, "total")
    if outcome == OK:
        metrics.last_answer.set(datetime.now(UTC).timestamp(), *labels)
    else:
        metrics.failed_seconds.add(*labels, by=seconds)


def count_answer(metrics: Metrics, tracked: TrackedRequest, received: float) -> None:
    """Count the way back and the encoding of an answer that is encoded now. received: when its encoding began."""
    assert tracked.answer is not None
    tracked.received = received
    metrics.stage_seconds.observe(max(0.0, received - tracked.answer.ready), *tracked.labels, "reply")
    metrics.stage_seconds.observe(time.monotonic() - received, *tracked.labels, "encode")


RequestBuilder = Callable[[ServedModel], Awaitable[tuple[Request, bytes | memoryview]]]
"""Validates a client's inputs for a model, and returns the engine's request and its tensor bytes; raises a ServiceError."""


async def run_inference(
    frontend: Frontend,
    tracked: TrackedRequest,
    name: str,
    version: str | int | None,
    session: str | None,
    build: RequestBuilder,
) -> tuple[ServedModel, Answered]:
    """Submit a request to an engine, and return the model that ran it with the engine's answer; raises a ServiceError.

    version: None for the newest, or for the version that the session began with.
    Requests leave for the engine in the order in which the coroutines start, except those whose `build` waits.
    """
    model, unknown = frontend.catalog.find_or_retired(name, version)
    for _ in range(MAX_ATTEMPTS):
        tracked.labels = model.key.labels
        try:
            request, tail = await build(model)
            request = tracked.caller.admit(request)
            if unknown is not None:
                request = _continue_only(request, unknown)
            if tracked.timed or tracked.observation is not None or frontend.observer.times_all:
                request = msgspec.structs.replace(request, timed=True)
            tracked.sent, tracked.lengths = request.sent, request.lengths
            frontend.metrics.stage_seconds.observe(request.sent - tracked.arrived, *tracked.labels, "parse")
            tracked.answer, data = await frontend.submit(tracked.caller, request, tail)
            return model, Answered(tracked.answer, data)
        except (SessionConflict, InvalidInput, TooLarge) as error:
            session_model = await _model_of_session(frontend, model, session and tracked.caller.session(session), error)
            if session_model is None or (version is not None and session_model.version != model.version):
                raise
            model, unknown = session_model, None
    raise SessionConflict(
        "another client keeps restarting this session while the chunk arrives: send one chunk after the other", field="session"
    )


def may_be_of_another_version(frontend: Frontend, model: ServedModel, session: str | None, error: ServiceError) -> bool:
    """Return whether a request to a session may have failed because the session belongs to another version than `model`.

    A session stays with the version that it began with, although a newer version may be served now. An input may be valid only for that
    version.
    """
    if isinstance(error, SessionConflict):
        return error.elsewhere is not None
    return session is not None and isinstance(error, InvalidInput | TooLarge) and frontend.catalog.has_other_versions(model.key)


async def _model_of_session(
    frontend: Frontend, model: ServedModel, session: str | None, error: ServiceError
) -> ServedModel | None:
    """Return the version that the session belongs to when it differs from `model` and may therefore be the cause of the error."""
    if session is None or not may_be_of_another_version(frontend, model, session, error):
        return None
    if isinstance(error, SessionConflict):
        key = error.elsewhere and ModelKey(*error.elsewhere)
    else:
        key = await frontend.dispatcher.model_of_session(session)
    if not key or key == model.key or key.name != model.spec.name or key not in frontend.catalog:
        return None
    return frontend.catalog[key]


def _both(first: Callable[[], None], second: Callable[[], None] | None) -> Callable[[], None]:
    def call() -> None:
        first()
        if second is not None:
            second()

    return call


def _continue_only(request: Request, unknown: ServiceError) -> Request:
    """Return a request that only continues a session, as its model is no longer served; raises `unknown` for any other request."""
    if request.session is None or request.session_starts:
        raise unknown
    return msgspec.structs.replace(request, session_starts=False)
