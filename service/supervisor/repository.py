"""The models folder: which versions it has, which of them are to be served, and what stands in each. Reads files and starts nothing."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from service.errors import ModelError
from service.ipc.messages import Manifest, ModelVersion
from service.modeling import spec
from service.settings import VERSIONS

POLICY = "versions.toml"
"""In the folder of a model: `serve`, which of its versions are served."""
Fingerprint = frozenset[tuple[str, int, int]]
"""Path, size and time of the last change of every file: whatever is copied there changes it."""


def chosen(policy: str, versions: Sequence[str]) -> list[str]:
    """Those of the versions, rising, that a policy names; raises ModelError for one that is not there."""
    if policy == "all":
        return list(versions)
    if policy.startswith("latest"):
        return list(versions[-int(policy.partition(":")[2] or 1) :])
    wanted = sorted(set(policy.split(",")), key=int)
    missing = [version for version in wanted if version not in versions]
    if missing:
        raise ModelError(f"version {missing[0]} is to be served and there is none: there are {', '.join(versions)}")
    return wanted


class Repository:
    """A models folder, looked at again each time that it is asked for something. policy: of the models that have none of their own."""

    def __init__(self, root: Path, policy: str = "all") -> None:
        self._root = root
        self._policy = policy
        self._generations = count(1)
        self._whole: dict[Path, Fingerprint] = {}
        """What folders looked like when their files were last read and found to be what their specs name."""

    def manifest(self) -> Manifest:
        """All that is to be served; raises ModelError at the first fault."""
        model_versions = [model_version for name in spec.find(self._root) for model_version in self.read(name)]
        return Manifest(model_versions, spec.aliases(self._root, by_name(model_versions)))

    def read(self, name: str, policy: str | None = None) -> list[ModelVersion]:
        """The versions of a model that are to be served, by its own policy if none is given, each of a generation of its own; raises
        ModelError. name: of a folder in the models folder."""
        folder = self._root / name
        versions = spec.versions(folder)
        return [
            self._model_version(versions[version]) for version in chosen(policy or self._own_policy(folder), list(versions))
        ]

    def check(self, model_version: ModelVersion) -> None:
        """Whether the folder of an edition still has the files that its spec names; raises ModelError. Files that look as before are not
        read again."""
        folder = Path(model_version.folder)
        now = frozenset(_files(folder))
        if now != self._whole.get(folder):
            model = spec.ModelSpec.model_validate_json(model_version.spec)
            for name in model.sha256:
                spec.verified(folder / name, model)
            self._whole[folder] = now

    def aliases(self) -> dict[str, str]:
        """Other names of whatever is in the folder, served or not; raises ModelError for one that leads nowhere."""
        return spec.aliases(self._root, self.listing())

    def listing(self) -> dict[str, list[str]]:
        """The names and versions of all that looks like a model."""
        return {
            folder.name: [version.name for version in spec.folders(folder)]
            for folder in spec.folders(self._root)
            if spec.NAME.fullmatch(folder.name)
        }

    def has(self, name: str) -> bool:
        """Whether there is a folder of this name, which may be whatever a caller sent."""
        return bool(spec.NAME.fullmatch(name)) and (self._root / name).is_dir()

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Of each model; and, under no name, of the aliases."""
        found = {folder.name: frozenset(_files(folder)) for folder in spec.folders(self._root)}
        aliases = self._root / spec.ALIASES
        return found | {"": frozenset(_stat(aliases, self._root) if aliases.exists() else ())}

    def _model_version(self, folder: Path) -> ModelVersion:
        model = spec.read(folder)
        return ModelVersion(model.name, folder.name, next(self._generations), str(folder), model.model_dump_json())

    def _own_policy(self, folder: Path) -> str:
        file = folder / POLICY
        try:
            said = tomllib.loads(file.read_text()) if file.exists() else {}
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
            raise ModelError(f"{file}: {fault}") from fault
        policy = said.pop("serve", self._policy)
        if said or not isinstance(policy, str) or not VERSIONS.fullmatch(policy):
            raise ModelError(f'{file}: it has one key, serve, which is "all", "latest", "latest:2" or versions such as "1,3"')
        return policy


def by_name(model_versions: Sequence[ModelVersion]) -> dict[str, list[str]]:
    """The versions of each model, in their order."""
    found: dict[str, list[str]] = {}
    for model_version in model_versions:
        found.setdefault(model_version.name, []).append(model_version.version)
    return found


def renewed(model_versions: Sequence[ModelVersion], served: Mapping[tuple[str, str], ModelVersion]) -> list[ModelVersion]:
    """These, and in the place of each that says what is served already, that one: it need not be loaded again."""

    def same(model_version: ModelVersion) -> ModelVersion:
        old = served.get((model_version.name, model_version.version))
        return (
            old if old is not None and (old.spec, old.folder) == (model_version.spec, model_version.folder) else model_version
        )

    return [same(model_version) for model_version in model_versions]


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield from _stat(path, folder)


def _stat(path: Path, root: Path) -> Iterator[tuple[str, int, int]]:
    found = path.stat()
    yield str(path.relative_to(root)), found.st_size, found.st_mtime_ns
