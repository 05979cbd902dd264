"""Finds the model versions that end engines, by the versions that each engine tried when it ended. Pure: starts and stops nothing.

An end counts against the versions that the engine was loading or running for the first time. It does not count while another engine
has run the version: then the version does not end every engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from service.errors import InvalidModel
from service.ipc.messages.models import ModelKey, ModelVersion

MAX_ENDS = 3
"""Engines in a row that may end with a version before it is refused."""


class Trials:
    """Counts the engines in a row that ended with each version. A version that is refused is not loaded any more."""

    def __init__(self) -> None:
        self._ends: Counter[ModelKey] = Counter()
        self._refused: set[ModelKey] = set()

    def count_end(self, key: ModelKey, *, survived: Collection[ModelKey], ran_elsewhere: bool) -> InvalidModel | None:
        """Count the end of an engine against a version. Returns the error with which the version is refused from now on, if it is.

        survived: the versions that this engine had loaded. Without another version among them the device itself may be the cause, and
        refusing one version after the other would not help. ran_elsewhere: whether another engine has run the version.
        """
        if ran_elsewhere or key in self._refused:
            return None
        self._ends[key] += 1
        if self._ends[key] < MAX_ENDS or not set(survived) - {key}:
            return None
        self._refused.add(key)
        return InvalidModel(
            f"{self._ends[key]} engines in a row ended while they loaded this version or ran its first batch", field="model"
        )

    def count_pass(self, key: ModelKey) -> None:
        """Forget earlier ends: an engine has run the version."""
        del self._ends[key]

    def has_ended_engines(self, key: ModelKey) -> bool:
        return bool(self._ends[key])

    def to_load(self, versions: Iterable[ModelVersion]) -> list[ModelVersion]:
        """Return the versions that an engine has to load. Versions with which no engine ended come first: they show that it works."""
        return sorted(
            (version for version in versions if version.key not in self._refused), key=lambda version: self._ends[version.key]
        )

    def keep(self, keys: Collection[ModelKey]) -> None:
        """Forget all versions but these."""
        self._ends = Counter({key: ends for key, ends in self._ends.items() if key in keys})
        self._refused &= set(keys)
