"""Changes the served models while the service runs: one change at a time, carried out by all processes.

Engines and frontends first prepare the new versions while they serve the old versions. Then every frontend switches, each at one moment.
Then the engines unload versions that are no longer served, as soon as nothing uses them. A change that fails or is cancelled before the
switch has no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from service.errors import (
    InferenceFailed,
    InvalidInput,
    InvalidModel,
    ModelError,
    ServiceError,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from service.ipc.messages.control import MAX_POLICY_CHARACTERS, CloseModel, ForgetModel, PrepareModel, ServeModels
from service.ipc.messages.message import Done, Message, Refusal
from service.ipc.messages.models import LOADING, READY, UNAVAILABLE, UNLOADING, IndexEntry, Manifest, ModelKey, ModelVersion
from service.log import Log
from service.metrics import GONE, Metrics
from service.settings import Settings
from service.supervisor.process import ENGINE, FRONTEND, Child
from service.supervisor.repository import Fingerprint, FolderReader, Repository, keep_unchanged, read_in_thread
from service.supervisor.trials import Trials

T = TypeVar("T")
READ_SECONDS = 10.0
"""Longest read of names and small files in the models folder. Weights may take SEQSERVE_START_SECONDS."""

POLL_SECONDS = 5.0
"""Time between two reads of the models folder with SEQSERVE_RELOAD=poll."""
UNLOAD_SECONDS = 30.0
"""How long sessions of an unloaded version may continue. After that, each remaining session gets 409 once."""


class ModelReloader:
    """Loads and unloads models at run time. `manifest` is what frontends serve.

    `on_unloaded` is called with each version that no process has any more.
    """

    def __init__(
        self,
        repository: Repository,
        settings: Settings,
        children: Callable[[], Iterable[Child]],
        on_unloaded: Callable[[ModelKey], None],
        trials: Trials,
        metrics: Metrics,
        log: Log,
    ) -> None:
        """Raises ModelError when the models folder cannot be served as it is."""
        self._repository = repository
        self._settings = settings
        self._children = children
        self._on_unloaded = on_unloaded
        self._trials = trials
        self._metrics = metrics
        self._log = log
        self._reasons: dict[tuple[str, str], str] = {}
        """Why a version could not be loaded, or why the last change of a model failed: then the version is empty."""
        self.manifest, self._loaded = self._read_at_start()
        """`_loaded` has the fingerprint of each model when it was last loaded, successfully or not."""
        self._preparing: list[ModelVersion] = []
        self._closing: Counter[ModelKey] = Counter()
        """Versions that were served and are being unloaded."""
        self._policies: dict[str, str] = {}
        """Policies that clients chose, by model; they hold until another is chosen."""
        self._not_loaded: set[ModelKey] = set()
        """Versions in service that a process started without."""
        self._reader = FolderReader()
        self._lock = asyncio.Lock()
        self._closed = False
        self._background: set[asyncio.Task[None]] = set()

    def engine_manifest(self) -> Manifest:
        """Return the versions that a starting engine has to load: those in service and those in preparation.

        A version in preparation with which an engine ended is not loaded: its load is about to fail.
        """
        preparing = [version for version in self._preparing if not self._trials.has_ended_engines(version.key)]
        return Manifest(self._trials.to_load([*self.manifest.model_versions, *preparing]), self.manifest.aliases)

    async def load(self, name: str, policy: str | None = None) -> None:
        """Serve the current content of a model's folder; raises a ServiceError. policy: from now on, instead of the model's own policy."""
        if policy is not None and len(policy) > MAX_POLICY_CHARACTERS:
            raise InvalidInput(
                f"the version policy has {len(policy)} characters and at most {MAX_POLICY_CHARACTERS} are allowed: shorten it",
                field="parameters.config",
            )
        self._check_shared("load", policy)
        async with self._change(name):
            await self._load(name, policy)

    async def unload(self, name: str) -> None:
        """Stop serving a model, or listing it as unavailable; raises a ServiceError."""
        self._check_shared("unload")
        async with self._change(name):
            rest = [version for version in self.manifest.model_versions if version.name != name]
            if len(rest) == len(self.manifest.model_versions) and not self._reasons_of(name):
                served = ", ".join(sorted({version.name for version in rest})) or "none"
                raise UnknownModel(f"{name!r} is not served: served are {served}", field="model")
            self._forget_reasons(name)
            await self._switch(rest, self.manifest.aliases)

    async def leave_out(self, key: ModelKey, error: ServiceError, *, everywhere: bool) -> None:
        """Note that a process started without a version. everywhere: stop serving the version, because no process of its role has it, or
        because every engine ended with it."""
        async with self._lock:
            if key not in {version.key for version in self.manifest.model_versions}:
                return
            reason = self._relative(error.message)
            if key not in self._not_loaded:
                self._not_loaded.add(key)
                self._metrics.model_changes.add(error.code)
            self._reasons[key.labels] = reason
            if everywhere:
                self._log.error("not served", model=key.name, version=key.version, reason=reason)
                rest = [version for version in self.manifest.model_versions if version.key != key]
                await self._switch(rest, self.manifest.aliases)

    async def index(self) -> list[IndexEntry]:
        """Return every version in the models folder or in service, with its state; raises a ServiceError."""
        listing = await self._read(self._repository.listing)
        served = {(version.name, version.version) for version in self.manifest.model_versions}
        preparing = {(version.name, version.version) for version in self._preparing}
        closing = {key.labels for key in self._closing}
        entries = []
        in_folder = ((name, version) for name, versions in listing.items() for version in versions or [""])
        for name, version in sorted({*served, *in_folder}):
            reason = self._reasons.get((name, version)) or self._reasons.get((name, ""), "")
            if (name, version) in served:
                entries.append(IndexEntry(name, version, READY, reason))
            elif (name, version) in preparing:
                entries.append(IndexEntry(name, version, LOADING))
            elif (name, version) in closing and (name, version) not in self._reasons:
                entries.append(IndexEntry(name, version, UNLOADING))
            else:
                entries.append(IndexEntry(name, version, UNAVAILABLE, reason or "the version policy does not select it"))
        return entries

    async def poll(self) -> None:
        """Load changes of the models folder, every POLL_SECONDS."""
        seen: dict[str, Fingerprint] = {}
        while not self._closed:
            await asyncio.sleep(POLL_SECONDS)
            try:
                now = await self._read(self._repository.fingerprints)
            except ServiceError as error:
                self._log.error("models folder cannot be read", error=error.message)
            else:
                await self._load_changes(now, seen)
                seen = now

    def close(self) -> None:
        """Begin no further change, and stop waiting for engines to unload."""
        self._closed = True
        for task in self._background:
            task.cancel()

    # A change.

    def _check_shared(self, action: str, policy: str | None = None) -> None:
        """Raise Unsupported for a change by a client that would make this replica differ from the others.

        A load is allowed if every replica polls the models folder: it serves at once what the others serve at their next poll.
        """
        if not self._settings.replicated or self._settings.reload == "off":
            return
        reason = f"SEQSERVE_REPLICATED is set and this call would {action} the model on one replica only"
        if self._settings.reload != "poll":
            raise Unsupported(f"{reason}: share the models folder and set SEQSERVE_RELOAD=poll, or replace the replicas")
        if action != "load" or policy is not None:
            raise Unsupported(f"{reason}: change the models folder, or the versions.toml in it, which every replica polls")

    @asynccontextmanager
    async def _change(self, name: str) -> AsyncIterator[None]:
        """Hold the lock for one change of a model; log and count its outcome."""
        if self._settings.reload == "off":
            raise Unsupported("SEQSERVE_RELOAD is off: restart the service to change its models, or set it to request or poll")
        outcome = InferenceFailed.code
        try:
            async with self._lock:
                if self._closed:
                    raise Unavailable("the service is shutting down")
                try:
                    yield
                except ServiceError as error:
                    # Unknown names are not noted: clients could fill the memory.
                    if not isinstance(error, UnknownModel):
                        await self._note_failure(name, error)
                    raise
        except asyncio.CancelledError:
            outcome = GONE
            self._log.info("change cancelled", model=name)
            raise
        except ServiceError as error:
            outcome = error.code
            # Unknown names are not logged: clients could flood the log.
            if not isinstance(error, UnknownModel):
                self._log.warning("not changed", model=name, reason=error.message)
            raise
        else:
            outcome = "ok"
            self._log.info("changed", model=name, serves=[v.version for v in self.manifest.model_versions if v.name == name])
        finally:
            self._metrics.model_changes.add(outcome)

    async def _load(self, name: str, policy: str | None) -> None:
        if not await self._read(partial(self._repository.has, name)):
            raise UnknownModel(f"the models folder has no folder {name!r}", field="model")
        policy = policy or self._policies.get(name)
        found = await self._read(partial(self._repository.read, name, policy))
        served = {
            (version.name, version.version): version
            for version in self.manifest.model_versions
            if version.key not in self._not_loaded
        }
        selected = keep_unchanged(found, served)
        for version in selected:
            if version in self.manifest.model_versions:
                await self._read(partial(self._repository.check, version), self._settings.start_seconds)
        others = [version for version in self.manifest.model_versions if version.name != name]
        aliases = await self._read(self._repository.aliases)
        await self._prepare([version for version in selected if version not in self.manifest.model_versions])
        self._forget_reasons(name)
        await self._switch(sorted([*others, *selected], key=lambda version: (version.name, int(version.version))), aliases)
        if policy is not None:
            self._policies[name] = policy

    async def _load_changes(self, now: dict[str, Fingerprint], before: dict[str, Fingerprint]) -> None:
        """Load models with a folder that has changed since the last load and is stable now; unload models without a folder."""
        for name, fingerprint in now.items():
            if fingerprint != self._loaded.get(name) and fingerprint == before.get(name):
                self._loaded[name] = fingerprint
                with contextlib.suppress(ServiceError):  # the log and the index have the error
                    await (self.load(name) if name else self._load_aliases())
        listed = {version.name for version in self.manifest.model_versions} | {name for name, _ in self._reasons}
        for name in sorted(listed - now.keys()):
            self._loaded.pop(name, None)
            with contextlib.suppress(ServiceError):
                await self.unload(name)

    async def _load_aliases(self) -> None:
        async with self._change(""):
            aliases = await self._read(self._repository.aliases)
            self._forget_reasons("")
            await self._switch(self.manifest.model_versions, aliases)

    async def _prepare(self, model_versions: list[ModelVersion]) -> None:
        """Prepare versions in every engine and frontend, all versions or none; raises a ServiceError."""
        self._preparing = model_versions
        try:
            for model_version in model_versions:
                engines = self._children_with(ENGINE)
                errors = await self._call_all([*self._children_with(FRONTEND), *engines], PrepareModel(model_version))
                for error in errors.values():
                    raise error
                for engine in engines:
                    if engine.ended.is_set() and model_version.key in engine.on_trial:
                        raise Unavailable(
                            f"{engine.name} ended while it loaded {model_version.name} version {model_version.version}: retry, and "
                            "if engines end again, repair the model",
                            retry_after=1,
                        )
        except BaseException:
            # Also after a cancellation: engines unload what they have prepared, or are still preparing.
            self._unload([version.key for version in model_versions], session_seconds=0.0)
            raise
        finally:
            self._preparing = []

    async def _switch(self, model_versions: list[ModelVersion], aliases: dict[str, str]) -> None:
        """Switch all frontends to these versions and unload the others. A cancellation comes too late for this step."""
        manifest = Manifest(model_versions, aliases, self._unavailable(model_versions))
        if manifest != self.manifest:
            await _run_to_the_end(self._switch_frontends(manifest))

    async def _switch_frontends(self, manifest: Manifest) -> None:
        keys = {version.key for version in manifest.model_versions}
        replaced = [version.key for version in self.manifest.model_versions if version.key not in keys]
        self.manifest = manifest
        self._not_loaded &= keys
        self._trials.keep(keys | {version.key for version in self._preparing})
        errors = await self._call_all(self._children_with(FRONTEND), ServeModels(manifest))
        for frontend, error in errors.items():
            # It would send requests to versions that are about to be unloaded; its successor starts with this manifest.
            self._log.error("frontend did not switch", child=frontend.name, error=error.message)
            frontend.kill("ended")
        self._closing.update(replaced)
        self._unload(replaced, UNLOAD_SECONDS)

    # Reasons.

    async def _note_failure(self, name: str, error: ServiceError) -> None:
        """Keep why the last change of a model failed. Frontends learn of it if the model is not served."""
        self._forget_reasons(name)
        self._reasons[name, ""] = error.message
        unavailable = self._unavailable(self.manifest.model_versions)
        if unavailable != self.manifest.unavailable:
            await self._switch(self.manifest.model_versions, self.manifest.aliases)

    def _reasons_of(self, name: str) -> list[tuple[str, str]]:
        return [labels for labels in self._reasons if labels[0] == name]

    def _forget_reasons(self, name: str) -> None:
        for labels in self._reasons_of(name):
            del self._reasons[labels]

    def _unavailable(self, model_versions: list[ModelVersion]) -> list[IndexEntry]:
        """Return the entries that should be served and are not among these versions, with the reasons."""
        served = {labels for version in model_versions for labels in (version.key.labels, (version.name, ""))}
        return [
            IndexEntry(*labels, UNAVAILABLE, reason)
            for labels, reason in sorted(self._reasons.items())
            if labels[0] and labels not in served
        ]

    def _unload(self, keys: list[ModelKey], session_seconds: float) -> None:
        """Have the engines unload versions in the background, each when nothing uses it any more."""
        for key in keys:
            task = asyncio.get_running_loop().create_task(self._unload_one(key, session_seconds))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _unload_one(self, key: ModelKey, session_seconds: float) -> None:
        # An engine that ends meanwhile has unloaded the version as well.
        calls = [engine.call(CloseModel(key, session_seconds), Done) for engine in self._children_with(ENGINE)]
        await asyncio.gather(*calls, return_exceptions=True)
        self._closing -= Counter([key])
        for frontend in self._children_with(FRONTEND):
            frontend.send(ForgetModel(key))
        if not any(version.key.labels == key.labels for version in self.manifest.model_versions):
            self._on_unloaded(key)

    # Calls and reads.

    def _children_with(self, role: str) -> list[Child]:
        return [child for child in self._children() if child.role == role]

    async def _call_all(self, children: Collection[Child], message: Message) -> dict[Child, ServiceError]:
        """Call several children at once; return the error of each child that refuses or is late.

        A child that ends meanwhile counts as successful: its successor starts with the manifest of that time.
        """
        errors = await asyncio.gather(*(self._call(child, message) for child in children))
        return {child: error for child, error in zip(children, errors, strict=True) if error is not None}

    async def _call(self, child: Child, message: Message) -> ServiceError | None:
        limit = self._settings.start_seconds
        try:
            async with asyncio.timeout(limit):
                await child.call(message, Done)
        except TimeoutError:
            return Unavailable(
                f"{child.name} did not reply within {limit:g} s: retry, or raise SEQSERVE_START_SECONDS", retry_after=1
            )
        except ServiceError as error:
            refusal = Refusal.of(error)
            return (
                None if child.ended.is_set() else msgspec.structs.replace(refusal, message=self._relative(error.message)).error
            )
        return None

    async def _read(self, read: Callable[[], T], seconds: float = READ_SECONDS) -> T:
        """Read from the models folder. Raises InvalidModel for an error in it, and Unavailable when the read takes too long."""
        try:
            return await self._reader.run(read, seconds)
        except TimeoutError:
            raise Unavailable(
                f"the models folder did not answer within {seconds:g} s: check its disk or network mount, then retry",
                retry_after=1,
            ) from None
        except (ModelError, OSError) as error:
            raise InvalidModel(self._relative(str(error)), field="model") from error

    def _read_at_start(self) -> tuple[Manifest, dict[str, Fingerprint]]:
        limit = self._settings.start_seconds
        read = self._repository.manifest if self._settings.strict else self._repository.readable_manifest
        try:
            # In a thread: a signal then ends the start even when the models folder hangs.
            manifest, fingerprints = read_in_thread(lambda: (read(), self._repository.fingerprints())).result(limit)
        except TimeoutError:
            raise ModelError(
                f"models folder {self._settings.models} did not answer within {limit:g} s: check its disk or network mount, "
                "or raise SEQSERVE_START_SECONDS"
            ) from None
        for entry in manifest.unavailable:
            self._reasons[entry.name, entry.version] = reason = self._relative(entry.reason)
            self._metrics.model_changes.add(InvalidModel.code)
            self._log.error("not served", model=entry.name, version=entry.version, reason=reason)
        return msgspec.structs.replace(manifest, unavailable=self._unavailable(manifest.model_versions)), fingerprints

    def _relative(self, message: str) -> str:
        """Return a message without the path of the models folder, which clients must not learn."""
        return message.replace(f"{self._settings.models}/", "")


async def _run_to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even when the caller is cancelled meanwhile. The cancellation is dropped: the work has taken effect."""
    task, caller = asyncio.ensure_future(work), asyncio.current_task()
    assert caller is not None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            caller.uncancel()
    task.result()
