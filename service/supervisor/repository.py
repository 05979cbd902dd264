"""The models folder: which versions it has, which of them to serve, and what each contains. Reads files and starts no process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from service.errors import ModelError
from service.ipc.messages.models import UNAVAILABLE, IndexEntry, Manifest, ModelVersion
from service.modeling import spec
from service.modeling.spec.files import read_toml
from service.settings import VERSIONS

T = TypeVar("T")
POLICY = "versions.toml"
"""File in a model's folder; its key `serve` chooses the versions to serve."""
Fingerprint = frozenset[tuple[str, int, int]]
"""Path, size and modification time of every file: any copy into the folder changes it."""
MAX_HUNG_READS = 8
"""Threads that may hang in the models folder before further reads are refused."""


def choose(policy: str, versions: Sequence[str]) -> list[str]:
    """Return the versions that a policy selects, in ascending order; raises ModelError for a version that does not exist."""
    if policy == "all":
        return list(versions)
    if policy.startswith("latest"):
        return list(versions[-int(policy.partition(":")[2] or 1) :])
    selected = sorted(set(policy.split(",")), key=int)
    missing = [version for version in selected if version not in versions]
    if missing:
        raise ModelError(
            f"the version policy selects version {missing[0]:.20}, which does not exist: choose from {', '.join(versions)}"
        )
    return selected


class Repository:
    """A models folder, read again at every call.

    policy: applies to models without a versions.toml. alias: another name of the model in a folder with one model.
    """

    def __init__(self, root: Path, policy: str = "all", alias: str = "") -> None:
        self._root = root
        self._policy = policy
        self._alias = alias
        self._generations = count(1)
        self._verified: dict[Path, Fingerprint] = {}
        """Fingerprints of version folders when all digests were last found to match."""

    def manifest(self) -> Manifest:
        """Return everything to serve; raises ModelError at the first error."""
        model_versions = [model_version for name in spec.find_models(self._root) for model_version in self.read(name)]
        return Manifest(model_versions, self._read_aliases(by_name(model_versions)))

    def readable_manifest(self, policy: str | None = None) -> Manifest:
        """Return the versions that can and cannot be served; raises ModelError for invalid aliases or if none can be served. policy:
        instead of the models' own."""
        model_versions: list[ModelVersion] = []
        unavailable: list[IndexEntry] = []
        for name, folder in spec.model_folders(self._root).items():
            try:
                selected = self._selected_folders(name, folder, policy)
            except (ModelError, OSError) as error:
                unavailable.append(IndexEntry(name, "", UNAVAILABLE, str(error)))
                continue
            for version, version_folder in selected.items():
                try:
                    model_versions.append(self._model_version(name, version, version_folder))
                except ModelError as error:
                    unavailable.append(IndexEntry(name, version, UNAVAILABLE, str(error)))
        if not model_versions:
            raise ModelError(unavailable[0].reason)
        return Manifest(model_versions, self._read_aliases(spec.versions_by_folder(self._root)), unavailable)

    def read(self, name: str, policy: str | None = None) -> list[ModelVersion]:
        """Return the versions of a model to serve, each with a new generation; raises ModelError.

        name: of a model in the models folder; policy: instead of the model's own policy.
        """
        folder = spec.named_folders(self._root).get(name, self._root / name)
        selected = self._selected_folders(name, folder, policy)
        return [self._model_version(name, version, version_folder) for version, version_folder in selected.items()]

    def check(self, model_version: ModelVersion) -> None:
        """Raise ModelError unless the version's folder still has the files that its spec names. Unchanged files are not read again."""
        folder = Path(model_version.folder)
        fingerprint = frozenset(_files(folder))
        if fingerprint != self._verified.get(folder):
            model = spec.ModelSpec.model_validate_json(model_version.spec)
            for name in model.sha256.keys() & {spec.WEIGHTS, spec.TOKENIZER}:
                spec.read_verified(folder / name, model)
            self._verified[folder] = fingerprint

    def aliases(self) -> dict[str, str]:
        """Return the aliases of all models in the folder, served or not; raises ModelError for an alias of an unknown model."""
        return self._read_aliases(self.listing())

    def listing(self) -> dict[str, list[str]]:
        """Return the versions in the folder by model name, valid or not."""
        return {name: versions for name, versions in spec.versions_by_folder(self._root).items() if spec.NAME.fullmatch(name)}

    def has(self, name: str) -> bool:
        """Return whether a model has this name; any string of a client is safe."""
        return bool(spec.NAME.fullmatch(name)) and name in spec.named_folders(self._root)

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return the fingerprint of each model and, under the empty name, of the aliases."""
        models = {name: frozenset(_files(folder)) for name, folder in spec.named_folders(self._root).items()}
        aliases = self._root / spec.ALIASES
        return models | {"": frozenset(_stat(aliases, self._root) if aliases.exists() else ())}

    def _read_aliases(self, models: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the aliases in the folder, and SEQSERVE_ALIAS for its only model; raises ModelError.

        models: the versions of each model.
        """
        aliases = spec.read_aliases(self._root, models)
        if self._alias and not spec.NAME.fullmatch(self._alias):
            raise ModelError(
                f"SEQSERVE_ALIAS is {self._alias!r}, which no model can have as a name: use letters, digits, '.', '_' and '-'"
            )
        if self._alias and len(models) == 1 and self._alias not in models:
            aliases.setdefault(self._alias, next(iter(models)))
        return aliases

    def _selected_folders(self, name: str, folder: Path, policy: str | None = None) -> dict[str, Path]:
        """Return the version folders of a model that are to be served; raises ModelError."""
        versions = spec.version_folders(folder, name)
        return {version: versions[version] for version in choose(policy or self._read_policy(folder), list(versions))}

    def _model_version(self, name: str, version: str, folder: Path) -> ModelVersion:
        model = spec.read(folder, name)
        return ModelVersion(name, version, next(self._generations), str(folder), model.model_dump_json())

    def _read_policy(self, folder: Path) -> str:
        """Return the policy in a model's versions.toml, or the default."""
        file = folder / POLICY
        values = read_toml(file) or {}
        policy = values.pop("serve", self._policy)
        if values or not isinstance(policy, str) or not VERSIONS.fullmatch(policy):
            raise ModelError(f'{file}: its only key is serve, with "all", "latest", "latest:2" or versions such as "1,3"')
        return policy


class FolderReader:
    """Runs reads of the models folder in sequence, each in a daemon thread.

    A read that hangs, as on a network disk, is abandoned: it holds up neither later reads nor the end of the service.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._abandoned: list[Future[Any]] = []

    async def run(self, read: Callable[[], T], seconds: float) -> T:
        """Return the result of `read`, or raise its error; raises TimeoutError when it takes longer than `seconds`."""
        async with self._lock:
            self._abandoned = [future for future in self._abandoned if not future.done()]
            if len(self._abandoned) >= MAX_HUNG_READS:
                raise TimeoutError
            future = read_in_thread(read)
            try:
                async with asyncio.timeout(seconds):
                    return await asyncio.wrap_future(future)
            finally:
                if not future.done():
                    self._abandoned.append(future)


def read_in_thread(read: Callable[[], T]) -> Future[T]:
    """Run `read` in a new daemon thread."""
    future = Future[T]()
    future.set_running_or_notify_cancel()  # nothing can cancel it from here on: only the thread completes it

    def run() -> None:
        try:
            result = read()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name="models-folder", daemon=True).start()
    return future


def by_name(model_versions: Sequence[ModelVersion]) -> dict[str, list[str]]:
    """Return the versions of each model, in their order."""
    versions: dict[str, list[str]] = {}
    for model_version in model_versions:
        versions.setdefault(model_version.name, []).append(model_version.version)
    return versions


def keep_unchanged(
    model_versions: Sequence[ModelVersion], served: Mapping[tuple[str, str], ModelVersion]
) -> list[ModelVersion]:
    """Replace each version by the served version with the same content, if any, which need not be loaded again."""

    def unchanged(model_version: ModelVersion) -> ModelVersion:
        old = served.get((model_version.name, model_version.version))
        same = old is not None and (old.spec, old.folder) == (model_version.spec, model_version.folder)
        return old if old is not None and same else model_version

    return [unchanged(model_version) for model_version in model_versions]


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):  # such as a folder that may not be entered
            if path.is_file():
                yield from _stat(path, folder)


def _stat(path: Path, root: Path) -> Iterator[tuple[str, int, int]]:
    status = path.stat()
    yield str(path.relative_to(root)), status.st_size, status.st_mtime_ns
