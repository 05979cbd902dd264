"""What a front serves: every version with its spec and its tokenizer, found by name, by alias and by what the engines call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from service.errors import ModelError, UnknownModel
from service.frontend.served_model import ModelIndex, ServedModel, find
from service.ipc.messages import Manifest, ModelKey, ModelVersion
from service.log import Log
from service.modeling.spec import ModelSpec
from service.modeling.tokenizer import Tokenizer


def read(model_version: ModelVersion) -> ServedModel:
    """An edition as a face sees it; raises ModelError when its tokenizer is not, or no longer, the one that its spec names."""
    spec = ModelSpec.model_validate_json(model_version.spec)
    tokenizer = Tokenizer.read(Path(model_version.folder), spec) if spec.input.kind == "text" else None
    return ServedModel(spec, model_version.version, tokenizer, model_version.generation)


def build_catalog(manifest: Manifest, log: Log, *, strict: bool) -> Catalog:
    """Read every model version with its tokenizer. One that fails raises ModelError, or is logged and left out unless `strict`."""
    models = []
    for version in manifest.model_versions:
        try:
            models.append(read(version))
        except ModelError as error:
            if strict:
                raise
            log.error("not loaded", model=version.name, version=version.version, error=str(error))
    return Catalog(models, manifest.aliases)


class Catalog:
    """`catalog` has what is served now; of what is not, or not yet, the rest is kept, for the sessions that began with it."""

    def __init__(self, served: Iterable[ServedModel], aliases: Mapping[str, str]) -> None:
        self._known = {one.key: one for one in served}
        self._aliases = aliases
        self.catalog = _catalog(self._known.values(), aliases)

    def __getitem__(self, key: ModelKey) -> ServedModel:
        return self._known[key]

    def __contains__(self, key: ModelKey) -> bool:
        return key in self._known

    @property
    def served(self) -> list[ServedModel]:
        """Every version that is served, once."""
        return list({one.key: one for versions in self.catalog.values() for one in versions.values()}.values())

    def others(self, key: ModelKey) -> bool:
        """Whether a session may be of another version of this model."""
        return any(other.name == key.name and other != key for other in self._known)

    def add(self, one: ServedModel) -> None:
        """To be served soon."""
        self._known[one.key] = one

    def serve(self, keys: Iterable[ModelKey], aliases: Mapping[str, str]) -> list[ModelKey]:
        """Serve these from now on, as far as they are known, versions of a model rising; returns what was served until now only."""
        before = [one.key for one in self.served]
        self.catalog, self._aliases = _catalog([self._known[key] for key in keys if key in self._known], aliases), aliases
        now = {one.key for one in self.served}
        return [key for key in before if key not in now]

    def forget(self, key: ModelKey) -> None:
        """No session began with it any more."""
        self._known.pop(key, None)

    def find(self, name: str, version: str | int | None) -> ServedModel:
        """What a caller names; raises UnknownModel."""
        return find(self.catalog, name, version)

    def retired(self, name: str, version: str | int | None) -> ServedModel | None:
        """What a caller names who goes on with a session that may have begun when it was still served."""
        model, _, pinned = self._aliases.get(name, name).partition("/")
        wanted = pinned or ("" if version is None else str(version))
        found = [key for key in self._known if key.name == model and wanted in ("", key.version)]
        return self._known[max(found, key=lambda key: key.generation)] if found else None


def unless_known(models: Catalog, name: str, version: str | int | None) -> tuple[ServedModel, UnknownModel | None]:
    """What a caller names, or what a session may have begun with, and then why nothing else finds it; raises UnknownModel for neither."""
    try:
        return models.find(name, version), None
    except UnknownModel as fault:
        retired = models.retired(name, version)
        if retired is None:
            raise
        return retired, fault


def _catalog(served: Iterable[ServedModel], aliases: Mapping[str, str]) -> ModelIndex:
    found: dict[str, dict[str, ServedModel]] = {}
    for one in served:
        found.setdefault(one.spec.name, {})[one.version] = one
    names: dict[str, Mapping[str, ServedModel]] = dict(found)
    for alias, meant in aliases.items():
        model, pinned, version = meant.partition("/")
        versions = found.get(model, {})
        # An alias of what is not served now finds nothing, until it is served again.
        if not pinned and versions:
            names[alias] = versions
        elif version in versions:
            names[alias] = {version: versions[version]}
    return names
