"""What is served, as a face sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.errors import UnknownModel
from service.frontend.wording import shown
from service.ipc.messages import ModelKey
from service.modeling.spec import ModelSpec
from service.modeling.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One version of a model as a face sees it. generation: of the folder's content, as the engines know it."""

    spec: ModelSpec
    version: str
    tokenizer: Tokenizer | None
    generation: int = 0

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.spec.name, self.version, self.generation)


ModelIndex = Mapping[str, Mapping[str, ServedModel]]
"""By name, then by version, versions rising."""


def find(catalog: ModelIndex, name: str, version: str | int | None) -> ServedModel:
    """The model that a caller names; raises UnknownModel naming what there is."""
    versions = catalog.get(name)
    if versions is None:
        raise UnknownModel(f"unknown model {shown(name)}: served are {', '.join(sorted(catalog))}", field="model")
    wanted = list(versions)[-1] if version is None else str(version)
    if wanted not in versions:
        raise UnknownModel(
            f"{name} has no version {shown(wanted)}: served are {', '.join(versions)}; leave version out for the newest",
            field="version",
        )
    return versions[wanted]
