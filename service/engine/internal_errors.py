"""Unexpected exceptions of an engine: bugs of the service or of a model. Requests may cause them, and must not fill the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from traceback import extract_tb

from service.engine.execution.device import DeviceLost
from service.errors import SERVICE_FAILED, InferenceFailed
from service.log import Log
from service.metrics import Metrics

LOG_SECONDS = 600.0
"""An exception of the same kind is logged again after this time."""
MAX_KINDS = 64
"""Further kinds are only counted."""
MAX_TEXT = 500
"""Characters of an exception's text in the log."""


class InternalErrors:
    """Counts exceptions, and logs the first of each kind. Two exceptions of one type from one line of code are of one kind."""

    def __init__(self, log: Log, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._metrics = metrics
        self._clock = clock
        self._logged: dict[tuple[str, ...], float] = {}
        """When each kind was logged last."""

    def report(self, work: str, error: Exception) -> InferenceFailed:
        """Count and log an exception. Returns the error for the client, which contains no detail.

        Raises a DeviceLost again: it ends the engine. work: one of metrics.ENGINE_WORK.
        """
        if isinstance(error, DeviceLost):
            raise error
        self._metrics.engine_errors.add(work)
        self.log("bug", error, work=work)
        return InferenceFailed(SERVICE_FAILED)

    def log(self, event: str, error: Exception, **values: str) -> None:
        """Log an exception, unless another of its kind was logged shortly before. values: from closed sets."""
        # The line of code that raised it.
        place = "".join(f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__, limit=-1))
        kind, now = (event, *values.values(), type(error).__qualname__, place), self._clock()
        if kind not in self._logged and len(self._logged) == MAX_KINDS:
            return
        if now - self._logged.get(kind, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged[kind] = now
            self._log.error(event, **values, error=f"{type(error).__name__}: {error}"[:MAX_TEXT], at=place)
