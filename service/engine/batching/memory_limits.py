"""Reduces the batches of a model for a while after the device had too little memory for a batch. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, replace

from service.engine.batching.batch_builder import SchedulerLimits
from service.ipc.messages.models import ModelKey

PERIOD_SECONDS = 5.0
"""How long a limit holds before it doubles. From one step to 4096 it takes a minute."""


@dataclass(slots=True)
class _Limit:
    tokens: int
    until: float


class MemoryLimits:
    """The batch limits of each model: the settings, or lower limits after a lack of memory."""

    def __init__(self, usual: SchedulerLimits) -> None:
        self._usual = usual
        self._limits: dict[ModelKey, _Limit] = {}

    def of(self, model: ModelKey) -> SchedulerLimits:
        if model not in self._limits:
            return self._usual
        return replace(self._usual, max_batch_tokens=self._limits[model].tokens)

    def shrink(self, model: ModelKey, tokens: int, now: float) -> None:
        """Halve the batches of a model, because the device had no memory for a batch with this number of tokens."""
        self._limits[model] = _Limit(max(1, min(tokens, self.of(model).max_batch_tokens) // 2), now + PERIOD_SECONDS)

    def relax(self, now: float) -> None:
        """Double each limit when its period has passed, up to the limit in the settings."""
        for model, limit in list(self._limits.items()):
            if now < limit.until:
                continue
            limit.tokens, limit.until = 2 * limit.tokens, now + PERIOD_SECONDS
            if limit.tokens >= self._usual.max_batch_tokens:
                del self._limits[model]

    def __bool__(self) -> bool:
        """Whether a model has a smaller limit now."""
        return bool(self._limits)
