"""Reduces the batches of a model for a while after the device had too little memory for a batch. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import replace

from service.engine.batching.selection import SchedulerLimits
from service.ipc.messages.models import ModelKey

PERIOD_SECONDS = 5.0
"""How long a limit holds before it doubles. From one step to 4096 it takes a minute."""


class MemoryLimits:
    """Lower batch limits of models than in the settings, after a lack of memory."""

    def __init__(self, usual: SchedulerLimits) -> None:
        self._usual = usual
        self.lowered: dict[ModelKey, SchedulerLimits] = {}
        self._until: dict[ModelKey, float] = {}

    def shrink(self, model: ModelKey, tokens: int, now: float) -> None:
        """Halve the batches of a model, because the device had no memory for a batch with this number of tokens."""
        limit = self.lowered.get(model, self._usual).max_batch_tokens
        self._limit(model, max(1, min(tokens, limit) // 2), now)

    def relax(self, now: float) -> None:
        """Double each limit when its period has passed, up to the limit in the settings."""
        for model in [model for model, until in self._until.items() if now >= until]:
            tokens = 2 * self.lowered[model].max_batch_tokens
            if tokens < self._usual.max_batch_tokens:
                self._limit(model, tokens, now)
            else:
                del self.lowered[model], self._until[model]

    def _limit(self, model: ModelKey, tokens: int, now: float) -> None:
        self.lowered[model], self._until[model] = replace(self._usual, max_batch_tokens=tokens), now + PERIOD_SECONDS
