"""What all APIs of one frontend share. Knows no protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from service.access.caller import Caller
from service.errors import SERVICE_FAILED, InferenceFailed, ServiceError, Unavailable
from service.frontend.decoder.client import BodyDecoder
from service.frontend.dispatch.connection import PendingRequest, Receiver
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.guards.limits import FrontendLimits
from service.frontend.run.access_control import AccessControl
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


class Frontend:
    """The state that all APIs of one frontend share. `draining` is true during shutdown."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        dispatcher: Dispatcher,
        metrics: Metrics,
        log: Log,
        supervisor: SupervisorClient,
        quota_counts: QuotaCounts | None = None,
        traces: TraceWriter | None = None,
    ) -> None:
        """quota_counts: of all frontends, None for a single frontend. traces: None if nothing is traced."""
        self.settings = settings
        self.catalog = catalog
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.log = log
        self.supervisor = supervisor
        self.draining = False
        self.access = AccessControl(settings)
        self.limits = FrontendLimits(settings, quota_counts or QuotaCounts.private(), metrics, log)
        self.decoder = BodyDecoder(settings, self.limits.bodies, self.limits.memory, log)
        self.large_answers = LargeAnswers()
        self.request_ids = RequestIds()
        self.tally = RequestTally(metrics)
        self.observer = Observer(settings, log, metrics, traces)
        self.statistics: tuple[Snapshot, dict[object, bytes]] = ({}, {})
        """The newest metrics from which statistics were made, and these statistics by what they describe."""

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
        if not (caller.is_limited or self.limits.memory.limited):
            return self.dispatcher.send(request, data, receiver)
        request, end = self.begin(caller, request, len(data))
        try:
            return self.dispatcher.send(request, data, receiver, on_end=end)
        except ServiceError:
            if end is not None:
                end()
            raise

    def begin(self, caller: Caller, request: Request, size: int) -> tuple[Request, Callable[[], None] | None]:
        """Count a request with `size` bytes of values, as `FrontendLimits.begin` does."""
        limits, key, numbers = self.limits, request.key, 0
        # A version that was forgotten while a body was parsed is refused later.
        if limits.memory.limited and key in self.catalog:
            numbers = self.catalog[key].answer_numbers(sum(request.lengths), sequence=request.returns.sequence)
        return limits.begin(caller, request, size, numbers)

    def forget(self, key: ModelKey) -> None:
        """Drop a version that no engine and no session uses any more, with its metric labels."""
        self.catalog.forget(key)
        if not any(model.key.labels == key.labels for model in self.catalog.served):
            self.metrics.forget(*key.labels)

    def error_for(self, error: Exception) -> ServiceError:
        """Return the error that the client receives for an exception, which is logged unless it is a ServiceError."""
        return error if isinstance(error, ServiceError) else self.internal_error(error)

    def internal_error(self, error: Exception) -> InferenceFailed:
        """Log an unexpected exception, and return the error for the client, which contains no detail."""
        self.log.capped("error", "bug", error=f"{type(error).__name__}: {error}")
        failure = InferenceFailed(SERVICE_FAILED)
        failure.in_frontend = True
        return failure
