"""What identifies a model version, and what the service serves."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class ModelKey(NamedTuple):
    """Identifies what a batch runs: one version of one model. `generation` tells apart successive contents of its folder."""

    name: str
    version: str
    generation: int = 0

    @property
    def labels(self) -> tuple[str, str]:
        """Return the metric labels: name and version."""
        return self.name, self.version


class ModelVersion(msgspec.Struct, array_like=True, frozen=True):
    """One version of a model as its folder was when it was read. `spec` is its model.toml as JSON."""

    name: str
    version: str
    generation: int
    folder: str
    spec: str

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.version, self.generation)


READY, LOADING, UNLOADING, UNAVAILABLE = "READY", "LOADING", "UNLOADING", "UNAVAILABLE"
"""States of a version in the models folder."""


class IndexEntry(msgspec.Struct, array_like=True, frozen=True):
    """One version in the models folder. `state` is READY, LOADING, UNLOADING or UNAVAILABLE; `reason` explains it
    where known.

    `version` is empty for a model without a readable version.
    """

    name: str
    version: str
    state: str
    reason: str = ""


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    """Everything to serve, the versions of each model in ascending order. An alias names a model or `model/version`.

    `unavailable` has the versions that should be served and cannot be, each with the reason.
    """

    model_versions: list[ModelVersion]
    aliases: dict[str, str]
    unavailable: list[IndexEntry] = []
