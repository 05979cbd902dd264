"""The quotas of keys: refuses requests beyond them, before they reach an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from service.access.caller import Caller, Quotas
from service.errors import QuotaExceeded
from service.ipc.quota_counts import KeyUse, QuotaCounts
from service.metrics import Metrics


class QuotaLedger:
    """Counts the requests of keys with quotas, over all frontends."""

    def __init__(self, counts: QuotaCounts, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = counts
        self._metrics = metrics
        self._clock = clock
        self._uses: dict[str, KeyUse] = {}

    def begin(self, caller: Caller, sequences: int, size: int) -> Callable[[], None]:
        """Count a request with `size` bytes of values. Returns a function to call once at its end. Raises QuotaExceeded."""
        use = self._uses.get(caller.name)
        if use is None:
            use = self._uses[caller.name] = self._counts.of_key(caller.name)
            for quota in Quotas._fields:
                self._metrics.quota_exceeded.start(caller.share.tenant, caller.name, f"max_{quota}")
        now = self._clock()
        self._check(caller, use, sequences, size, now)
        use.begin(sequences, size, now)
        return partial(use.end, sequences)

    @contextmanager
    def hold(self, caller: Caller, sequences: int, size: int) -> Iterator[None]:
        """Count a request that no engine answers, with a body of `size` bytes, within this context. Raises QuotaExceeded."""
        end = self.begin(caller, sequences, size) if any(caller.quotas) else None
        try:
            yield
        finally:
            if end is not None:
                end()

    def _check(self, caller: Caller, use: KeyUse, sequences: int, size: int, now: float) -> None:
        quotas, used = caller.quotas, use.total(now)
        if 0 < quotas.requests_per_second < used.requests + 1:
            raise self._exceeded(
                caller, "max_requests_per_second", quotas.requests_per_second, "requests a second", used.requests, 1
            )
        if 0 < quotas.bytes_per_second < used.bytes + size:
            raise self._exceeded(caller, "max_bytes_per_second", quotas.bytes_per_second, "bytes a second", used.bytes, size)
        if 0 < quotas.sequences_in_flight < used.in_flight + sequences:
            quota = quotas.sequences_in_flight
            raise self._exceeded(caller, "max_sequences_in_flight", quota, "sequences in flight", used.in_flight, sequences)

    def _exceeded(self, caller: Caller, name: str, quota: int, unit: str, used: float, more: int) -> QuotaExceeded:
        self._metrics.quota_exceeded.add(caller.share.tenant, caller.name, name)
        if more > quota:
            return QuotaExceeded(
                f"the request has {more} {unit} and {name} of the key {caller.name} is {quota}: send less at once"
            )
        return QuotaExceeded(
            f"the key {caller.name} has {used:.0f} {unit}, this request adds {more} and its quota {name} is {quota}: retry later",
            retry_after=1,
        )
