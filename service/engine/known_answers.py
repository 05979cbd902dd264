"""Checks in idle moments that each model still gives the answer that it gave at first. Damaged weights or a damaged device would change it.

Digests are compared when weights are read. These checks find later damage, in memory or in the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from service.engine.execution.device import DeviceLost
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import Array
from service.errors import OutOfMemory
from service.ipc.messages.models import ModelKey

CHECK_SECONDS = 30.0
"""Time between two checks of a model."""
RELATIVE, ABSOLUTE = 1e-3, 1e-3
"""By how much an answer may differ. The same input in the same batch gives the same bits, so this is generous."""


class KnownAnswers:
    """The first answer of each model to a fixed input."""

    def __init__(self, engine: DeviceEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._known: dict[ModelKey, list[Array]] = {}
        self._unchecked: list[ModelKey] = []
        self._next_pass = clock() + CHECK_SECONDS  # not at once: the first requests should not wait for it

    def next_model(self) -> ModelKey | None:
        """Return a model that is due to be checked."""
        now = self._clock()
        if now >= self._next_pass and not self._unchecked:
            self._next_pass = now + CHECK_SECONDS
            self._unchecked = [model.key for model in self._engine.loaded()]
            self._known = {key: answer for key, answer in self._known.items() if key in self._unchecked}
        while self._unchecked:
            key = self._unchecked.pop()
            if self._engine.serves(key):
                return key
        return None

    def check(self, key: ModelKey) -> None:
        """Compare the answer of a model with its first answer; raises DeviceLost if they differ. No batch may be in flight."""
        try:
            answer = self._engine.known_answer(key)
        except OutOfMemory:
            return  # it says nothing about the weights
        first = self._known.setdefault(key, answer)
        if len(first) != len(answer) or not all(map(_equal, first, answer)):
            raise DeviceLost(
                f"{key.name} version {key.version} gives another answer to the same input than before: "
                "its weights in memory or the device are damaged"
            )


def _equal(first: Array, answer: Array) -> bool:
    return first.shape == answer.shape and np.allclose(answer, first, RELATIVE, ABSOLUTE, equal_nan=True)
