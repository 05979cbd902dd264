"""What all APIs of one frontend share. Knows no protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from service.access.caller import NO_QUOTAS, Caller
from service.access.policy import AccessPolicy
from service.access.refused_keys import RefusedKeys
from service.access.state_keys import StateKeys
from service.errors import (
    SERVICE_FAILED,
    InferenceFailed,
    ServiceError,
    Unavailable,
)
from service.frontend.decoder.client import BodyDecoder
from service.frontend.dispatch.connection import PendingRequest, Receiver
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.guards.body_budget import MAX_RECEIVING_BYTES, BodyBudget
from service.frontend.guards.memory_guard import MemoryGuard, trim_heap
from service.frontend.guards.open_streams import OpenStreams
from service.frontend.guards.quotas import QuotaLedger
from service.frontend.guards.reading_turns import ReadingTurns
from service.frontend.guards.retry_budget import RetryBudget
from service.frontend.guards.start_queue import StartQueue
from service.frontend.http1.tls import TlsContexts
from service.frontend.run.catalog import Catalog
from service.frontend.run.large_answers import LargeAnswers
from service.frontend.run.observation import Observer
from service.frontend.run.origin import RequestIds
from service.frontend.run.tally import RequestTally
from service.ipc.messages.inference import Request
from service.ipc.messages.models import IndexEntry, Manifest, ModelKey
from service.ipc.quota_counts import QuotaCounts
from service.ipc.trace_socket import TraceWriter
from service.log import Log
from service.memory_limit import MemoryLimit
from service.metrics import Metrics, Snapshot
from service.settings import Settings


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
    tally: RequestTally = field(init=False)

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
        self.tally = RequestTally(self.metrics)
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


def _both(first: Callable[[], None], second: Callable[[], None] | None) -> Callable[[], None]:
    def call() -> None:
        first()
        if second is not None:
            second()

    return call
