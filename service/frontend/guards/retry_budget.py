"""The budget of retries: which refusals for overload invite their clients to send the request again.

Clients that repeat every refused request multiply the load, and the overload outlasts its cause. So a frontend invites retries for a
share of the requests that it answers, and asks the clients of all other refused requests to give up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import randint

from service.errors import OutOfMemory, Overloaded, ServiceError
from service.metrics import Metrics

SHARE = 0.1
"""Invited retries per answered request."""
LEAST_PER_SECOND = 1.0
"""Invited retries a second of a frontend that answers nothing: without them it would not learn that it has room again."""
MOST_SAVED = 10.0
"""Invited retries that a frontend saves up: a short burst is repeated as a whole, and a long overload gets no more than its share."""
REPEATED_SECONDS = (10, 20)
"""When an HTTP client that repeats the request in any case should do so. HTTP cannot forbid it. Delays differ to spread retries."""
OVERLOAD = (Overloaded, OutOfMemory)


class RetryBudget:
    """The retries that one frontend may invite. An answered request costs only the addition to `answered`."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self.answered = 0
        """Requests that were answered since the last refusal for overload."""
        self._saved = MOST_SAVED
        self._refused_at = clock()

    def charge(self, error: ServiceError) -> None:
        """Charge the budget for a refusal, or make it final if the budget is spent. Errors for other reasons stay as they are."""
        if not isinstance(error, OVERLOAD):
            return
        now = self._clock()
        earned = SHARE * self.answered + LEAST_PER_SECOND * (now - self._refused_at)
        self._saved, self.answered, self._refused_at = min(MOST_SAVED, self._saved + earned), 0, now
        if self._saved >= 1.0:
            self._saved -= 1.0
            return
        error.final = True
        error.retry_after = max(error.retry_after or 0, randint(*REPEATED_SECONDS))
        self._metrics.retries_discouraged.add()
