"""What is served changes while it is served: one change after the other, and all processes are told of each step of it.

Engines make what is new ready beside what they serve, and fronts read it; then the fronts turn to it, all at once each; then what is not
served any more may go, as soon as nothing of it is left. A change that fails before the fronts turn has not happened.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

import msgspec

from service.errors import (
    InferenceFailed,
    InvalidModel,
    ModelError,
    ServiceError,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from service.ipc import messages
from service.ipc.channel import Frame, encode
from service.ipc.messages import IndexEntry, Manifest, ModelKey, ModelVersion, Refusal
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from service.supervisor.process import ENGINE, Child
from service.supervisor.repository import Fingerprint, Repository, renewed

T = TypeVar("T")
Steps = Generator[Callable[[], bool], None, T]
"""Goes on when what it gave says so."""
Answer = Callable[[ServiceError | None], None]


@dataclass(slots=True, eq=False)
class _Round:
    """A word that several processes have to answer. missing: those that have not."""

    missing: set[Child]
    refused: dict[Child, Refusal] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Closing:
    """A version on its way out. missing: the engines that still have it."""

    key: ModelKey
    missing: set[Child]


class ModelReloader:
    """`manifest` is what fronts serve. on_gone hears of each version of which nothing is left anywhere.

    The models folder is read in a thread of its own: where it hangs, changes wait, and nothing else does.
    """

    def __init__(
        self,
        repository: Repository,
        settings: Settings,
        children: Callable[[], Iterable[Child]],
        on_gone: Callable[[ModelKey], None],
        metrics: Metrics,
        log: Log,
    ) -> None:
        """Raises ModelError when the models folder cannot be served as it is."""
        self._repository = repository
        self._settings = settings
        self._children = children
        self._on_gone = on_gone
        self._metrics = metrics
        self._log = log
        self.manifest = repository.manifest()
        self._pending: list[ModelVersion] = []
        self._policies: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        """Why a model could not be loaded when that was last tried."""
        self._tried: dict[str, Fingerprint] = repository.fingerprints()
        """What each folder looked like then."""
        self._seen: dict[str, Fingerprint] = {}
        self._poll_at = time.monotonic() + settings.poll_seconds
        self._reader = ThreadPoolExecutor(1, "repository")
        self._ids = count(1)
        self._rounds: dict[int, _Round] = {}
        self._closing: dict[int, _Closing] = {}
        self._waiting: deque[Steps[None]] = deque()
        """Changes that have not begun."""
        self._under_way: list[tuple[Steps[None], Callable[[], bool]]] = []
        self._changing = False

    def to_load(self) -> Manifest:
        """What an engine that starts now is to have."""
        return Manifest([*self.manifest.model_versions, *self._pending], self.manifest.aliases)

    def ask(self, frontend: Child, frame: Frame) -> None:
        """A front was asked to load or unload a model, or what there is."""
        message = frame.message
        if isinstance(message, messages.ListModels):
            self._begin(self._index(frontend, frame.id))
            return

        def answer(fault: ServiceError | None) -> None:
            if fault is None:
                frontend.tell(encode(messages.Done(), frame.id))
            else:
                frontend.tell(encode(Refusal.of(fault), frame.id))

        if self._settings.reload == "off":
            answer(
                Unsupported("models are loaded at the start only, as SEQSERVE_RELOAD is off: start the service anew, or set it")
            )
        elif isinstance(message, messages.LoadModel):
            self._waiting.append(self._change(message.name, self._load(message.name, message.policy), answer))
        elif isinstance(message, messages.UnloadModel):
            self._waiting.append(self._change(message.name, self._unload(message.name), answer))

    def handle_reply(self, child: Child, frame: Frame) -> None:
        """A process answers."""
        if frame.id in self._closing:
            self._left(frame.id, child)
        elif frame.id in self._rounds:
            if isinstance(frame.message, Refusal):
                self._rounds[frame.id].refused[child] = frame.message
            self._rounds[frame.id].missing.discard(child)

    def forget(self, child: Child) -> None:
        """A process has ended: nobody waits for it."""
        for one in self._rounds.values():
            one.missing.discard(child)
        for id in list(self._closing):
            self._left(id, child)

    def step(self) -> None:
        """Go on with whatever can."""
        if self._settings.reload == "poll" and time.monotonic() >= self._poll_at:
            self._poll_at = float("inf")
            self._begin(self._poll())
        if self._waiting and not self._changing:
            self._changing = True
            self._begin(self._waiting.popleft())
        for one in list(self._under_way):
            steps, ready = one
            if ready():
                self._under_way.remove(one)
                self._begin(steps)

    def close(self) -> None:
        """Read no more."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    # What a change consists of.

    def _change(self, name: str, steps: Steps[None], answer: Answer) -> Steps[None]:
        """One change, whatever comes of it."""
        fault: ServiceError | None = None
        try:
            yield from steps
        except ServiceError as refused:
            fault = refused
            # Whoever asks for what there is not fills no log.
            if not isinstance(refused, UnknownModel):
                self._reasons[name] = refused.message
                self._log.warning("not changed", model=name, reason=refused.message)
        except Exception as raised:
            fault = InferenceFailed("the service failed on this change: its log says why")
            self._log.error("bug", error=f"{type(raised).__name__}: {raised}")
        else:
            self._reasons.pop(name, None)
            self._log.info(
                "changed", model=name, serves=[one.version for one in self.manifest.model_versions if one.name == name]
            )
        self._changing = False
        self._metrics.model_changes.add("ok" if fault is None else fault.code)
        answer(fault)

    def _load(self, name: str, policy: str | None) -> Steps[None]:
        if not (yield from self._read(lambda: self._repository.has(name))):
            raise UnknownModel(f"the models folder has no folder {name!r:.100}", field="model")
        policy = policy or self._policies.get(name)
        model_versions = yield from self._read(lambda: self._repository.read(name, policy))
        served = {(one.name, one.version): one for one in self.manifest.model_versions}
        mine = renewed(model_versions, served)
        for model_version in mine:
            if model_version in self.manifest.model_versions:
                yield from self._read(partial(self._repository.check, model_version))
        wanted = [*(one for one in self.manifest.model_versions if one.name != name), *mine]
        aliases = yield from self._read(self._repository.aliases)
        yield from self._make_ready([one for one in wanted if one not in self.manifest.model_versions])
        yield from self._serve(Manifest(sorted(wanted, key=_place), aliases))
        if policy is not None:
            self._policies[name] = policy

    def _unload(self, name: str) -> Steps[None]:
        left = [one for one in self.manifest.model_versions if one.name != name]
        if len(left) == len(self.manifest.model_versions):
            served = ", ".join(sorted({one.name for one in left})) or "none"
            raise UnknownModel(f"{name!r:.100} is not served: served are {served}", field="model")
        yield from self._serve(Manifest(left, self.manifest.aliases))

    def _rename(self) -> Steps[None]:
        aliases = yield from self._read(self._repository.aliases)
        yield from self._serve(Manifest(self.manifest.model_versions, aliases))

    def _make_ready(self, fresh: list[ModelVersion]) -> Steps[None]:
        """Every engine and every front has it all, or none of it."""
        self._pending = fresh
        try:
            for model_version in fresh:
                one = yield from self._asked(list(self._children()), messages.PrepareModel(model_version))
                self._check(one)
        except ServiceError:
            self._go([model_version.key for model_version in fresh], seconds=0.0)
            raise
        finally:
            self._pending = []

    def _serve(self, manifest: Manifest) -> Steps[None]:
        now = {model_version.key for model_version in manifest.model_versions}
        gone = [model_version.key for model_version in self.manifest.model_versions if model_version.key not in now]
        self.manifest = manifest
        frontends = [child for child in self._children() if child.role != ENGINE]
        one = yield from self._asked(frontends, messages.ServeModels(manifest))
        for frontend in (*one.missing, *one.refused):
            # It would go on with what is about to go; its successor turns to what is there.
            self._log.error("frontend did not switch", child=frontend.name)
            frontend.process.kill()
        self._go(gone, self._settings.unload_seconds)

    def _go(self, keys: list[ModelKey], seconds: float) -> None:
        """These may go when nothing of them is left."""
        for key in keys:
            id, engines = next(self._ids), {child for child in self._children() if child.role == ENGINE}
            self._closing[id] = _Closing(key, engines)
            for engine in engines:
                engine.tell(encode(messages.CloseModel(key, seconds), id))
            if not engines:
                self._gone(id)

    def _left(self, id: int, engine: Child) -> None:
        closing = self._closing.get(id)
        if closing is not None:
            closing.missing.discard(engine)
            if not closing.missing:
                self._gone(id)

    def _gone(self, id: int) -> None:
        key = self._closing.pop(id).key
        for child in self._children():
            if child.role != ENGINE:
                child.tell(encode(messages.ForgetModel(key)))
        if not any(model_version.key.labels == key.labels for model_version in self.manifest.model_versions):
            self._on_gone(key)

    # What there is.

    def _index(self, frontend: Child, id: int) -> Steps[None]:
        try:
            listing = yield from self._read(self._repository.listing)
        except ServiceError as fault:
            frontend.tell(encode(Refusal(fault.code, fault.message), id))
            return
        served = {(one.name, one.version) for one in self.manifest.model_versions}
        loading = {(one.name, one.version) for one in self._pending}
        leaving = {one.key.labels for one in self._closing.values()}
        rows = []
        for where in sorted({*served, *((name, version) for name, versions in listing.items() for version in versions)}):
            reason = self._reasons.get(where[0], "")
            if where in served:
                rows.append(IndexEntry(*where, "READY", reason))
            elif where in loading or where in leaving:
                rows.append(IndexEntry(*where, "LOADING" if where in loading else "UNLOADING"))
            else:
                rows.append(IndexEntry(*where, "UNAVAILABLE", reason or "it is not asked for"))
        frontend.tell(encode(messages.ModelsListed(rows), id))

    def _poll(self) -> Steps[None]:
        """Load what has changed, and does not go on changing."""
        try:
            now = yield from self._read(self._repository.fingerprints)
        except ServiceError as fault:
            self._log.error("models folder cannot be read", error=fault.message)
        else:
            for name in now:
                if now[name] != self._tried.get(name) and now[name] == self._seen.get(name):
                    self._tried[name] = now[name]
                    self._waiting.append(self._change(name, self._load(name, None) if name else self._rename(), _unheard))
            for name in sorted({one.name for one in self.manifest.model_versions} - now.keys()):
                self._tried.pop(name, None)
                self._waiting.append(self._change(name, self._unload(name), _unheard))
            self._seen = now
        self._poll_at = time.monotonic() + self._settings.poll_seconds

    # How a step waits.

    def _begin(self, steps: Steps[None]) -> None:
        """Do as much as can be done now."""
        try:
            self._under_way.append((steps, next(steps)))
        except StopIteration:
            return

    def _read(self, read: Callable[[], T]) -> Steps[T]:
        """Something of the models folder; raises InvalidModel."""
        future = self._reader.submit(read)
        yield future.done
        try:
            return future.result()
        except (ModelError, OSError) as fault:
            raise InvalidModel(self._within_folder(str(fault)), field="model") from fault

    def _asked(self, children: list[Child], message: messages.Message) -> Steps[_Round]:
        """All of these are told; what they said against it, and who has said nothing for too long."""
        id, one = next(self._ids), _Round(set(children))
        self._rounds[id] = one
        for child in children:
            child.tell(encode(message, id))
        until = time.monotonic() + self._settings.start_seconds
        yield lambda: not one.missing or time.monotonic() > until
        return self._rounds.pop(id)

    def _check(self, one: _Round) -> None:
        """Raises what one of them said against it."""
        for refusal in one.refused.values():
            raise msgspec.structs.replace(refusal, message=self._within_folder(refusal.message)).error
        if one.missing:
            slow = ", ".join(sorted(child.name for child in one.missing))
            limit = f"SEQSERVE_START_SECONDS, {self._settings.start_seconds:g} s"
            raise Unavailable(f"{slow} did not do it within {limit}: retry, or raise it", retry_after=1)

    def _within_folder(self, message: str) -> str:
        """Without the way to the models folder, which is no caller's business."""
        return message.replace(f"{self._settings.models}/", "")


def _place(model_version: ModelVersion) -> tuple[str, int]:
    return model_version.name, int(model_version.version)


def _unheard(fault: ServiceError | None) -> None:
    """Nobody asked for it: the log and the index have it."""
