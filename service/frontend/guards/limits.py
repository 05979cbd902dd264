"""What limits the clients of one frontend: time, memory, connections' bytes, quotas and retries."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from service.access.caller import NO_QUOTAS, Caller
from service.frontend.guards.body_budget import MAX_RECEIVING_BYTES, BodyBudget
from service.frontend.guards.memory_guard import MemoryGuard, trim_heap
from service.frontend.guards.quotas import QuotaLedger
from service.frontend.guards.reading_turns import ReadingTurns
from service.frontend.guards.retry_budget import RetryBudget
from service.frontend.guards.start_queue import StartQueue
from service.ipc.messages.inference import Request
from service.ipc.quota_counts import QuotaCounts
from service.log import Log
from service.memory_limit import MemoryLimit
from service.metrics import Metrics
from service.settings import Settings


class FrontendLimits:
    """The limits of one frontend."""

    def __init__(self, settings: Settings, quota_counts: QuotaCounts, metrics: Metrics, log: Log) -> None:
        self._metrics = metrics
        self.turns = ReadingTurns()
        self.starts = StartQueue(settings.default_deadline_ms, self.turns)
        self.memory = MemoryGuard(settings.max_memory_share, MemoryLimit().read, metrics, log, trim_heap)
        self.bodies = BodyBudget(MAX_RECEIVING_BYTES, self.memory)
        self.quotas = QuotaLedger(quota_counts, metrics)
        self.retries = RetryBudget(metrics)

    def begin(
        self, caller: Caller, request: Request, size: int, answer_numbers: int
    ) -> tuple[Request, Callable[[], None] | None]:
        """Count a request. Return it as the engine may run it, and a function to call once at its end, if needed.

        size: bytes of its values. answer_numbers: numbers in its answer. Raises QuotaExceeded, and Overloaded if memory is short.
        """
        if caller.key:
            self._metrics.key_requests.add(caller.share.tenant, caller.name)
            self._metrics.key_tokens.add(caller.share.tenant, caller.name, by=sum(request.lengths))
        if caller.quotas == NO_QUOTAS:
            return self.memory.admit(request, size, answer_numbers) if self.memory.limited else (request, None)
        with ExitStack() as ends:
            ends.callback(self.quotas.begin(caller, len(request.lengths), size))
            if self.memory.limited:
                request, release = self.memory.admit(request, size, answer_numbers)
                if release is not None:
                    ends.callback(release)
            return request, ends.pop_all().close
