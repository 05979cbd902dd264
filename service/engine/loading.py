"""Which versions an engine serves, while it serves: they are made ready beside its turns, and go when nothing of them is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from service.engine.batching.batcher import Batcher
from service.engine.execution.cuda_graph_runner import Between
from service.engine.execution.device_engine import Prepared
from service.engine.loader_thread import LoaderThread
from service.errors import InvalidModel, ModelError, NoRoom, ServiceError
from service.ipc.messages import CloseModel, ModelKey, ModelVersion
from service.log import Log

LOOK_SECONDS = 0.02
"""How often it is looked whether anything is left of a version."""
CLOSING_SECONDS = 5.0
"""No front takes so long to say that it has turned to another version; one that came meanwhile has nothing to say."""
Load = Callable[[ModelVersion, Between], Prepared]
"""Makes what an edition says ready, in another thread than the one that launches turns."""
Answer = Callable[[ServiceError | None], None]


class Serves(Protocol):
    """What is asked of an engine."""

    def open(self, key: ModelKey, prepared: Prepared) -> None: ...

    def close(self, key: ModelKey) -> None: ...

    def serves(self, key: ModelKey) -> bool: ...


@dataclass(slots=True, eq=False)
class _Closing:
    """channels: those that may still bring something for it; forgotten_at: when they may not; until: when its sessions end."""

    channels: set[Hashable]
    forgotten_at: float
    until: float
    closed: Callable[[], None]


class ModelLoader:
    """Opens and closes versions at the word of the supervisor. `changed` is called after each."""

    def __init__(
        self, engine: Serves, batcher: Batcher, load: Load, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._batcher = batcher
        self._load = load
        self._log = log
        self._clock = clock
        self._loader = LoaderThread[Prepared]()
        self._closing: dict[ModelKey, _Closing] = {}
        self._released: set[tuple[Hashable, ModelKey]] = set()
        self._unwanted: set[ModelKey] = set()
        self._look_at = 0.0
        self.changed: Callable[[], None] = lambda: None

    def fileno(self) -> int:
        """Readable when `settle` has something to do."""
        return self._loader.fileno()

    def prepare(self, model_version: ModelVersion, answer: Answer) -> None:
        """Serve an edition as soon as it is ready; the answer is why it cannot be, if so."""

        def done(made: Future[Prepared]) -> None:
            fault = made.exception()
            if model_version.key in self._unwanted:
                self._unwanted.discard(model_version.key)
            elif fault is None:
                self._engine.open(model_version.key, made.result())
                self._log.info(
                    "loaded", model=model_version.name, version=model_version.version, generation=model_version.generation
                )
                self.changed()
            answer(None if fault is None else self._refusal(model_version, fault))

        self._loader.begin(lambda: self._load(model_version, self._loader.between_batches), done)

    def release(self, channel: Hashable, key: ModelKey) -> None:
        """Through this channel nothing begins any more with a version."""
        if key in self._closing:
            self._closing[key].channels.discard(channel)
        else:
            self._released.add((channel, key))

    def close(self, closing: CloseModel, channels: set[Hashable], closed: Callable[[], None]) -> None:
        """Serve a version no more once nothing is left of it, and none of these channels may bring anything."""
        key = closing.key
        if not self._engine.serves(key):
            # It may be under way: who wanted it has given it up.
            self._unwanted.add(key)
            closed()
            return
        left = {channel for channel in channels if (channel, key) not in self._released}
        self._released = {one for one in self._released if one[1] != key}
        now = self._clock()
        self._closing[key] = _Closing(left, now + CLOSING_SECONDS, now + closing.seconds, closed)

    def forget(self, channel: Hashable) -> None:
        """It brings nothing any more."""
        self._released = {one for one in self._released if one[0] is not channel}
        for closing in self._closing.values():
            closing.channels.discard(channel)

    def settle(self) -> None:
        """What was made ready is served; what nothing is left of goes."""
        self._loader.settle()
        if not self._closing or (now := self._clock()) < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        for key, closing in list(self._closing.items()):
            if now >= closing.forgotten_at:
                closing.channels.clear()
            if now >= closing.until:
                self._batcher.lose_sessions(key)
            if not closing.channels and not self._batcher.has(key):
                self._close(key, closing)

    def _close(self, key: ModelKey, closing: _Closing) -> None:
        del self._closing[key]
        self._batcher.close(key)
        self._engine.close(key)
        self._log.info("unloaded", model=key.name, version=key.version, generation=key.generation)
        self.changed()
        closing.closed()

    def _refusal(self, model_version: ModelVersion, fault: BaseException) -> ServiceError:
        said = f"{type(fault).__name__}: {fault}"
        self._log.error("not loaded", model=model_version.name, version=model_version.version, error=said)
        if isinstance(fault, ServiceError):
            return fault
        if isinstance(fault, MemoryError) or type(fault).__name__ == "OutOfMemoryError":
            return NoRoom(
                f"there is no memory for {model_version.name} version {model_version.version} beside what is served: unload another"
            )
        return InvalidModel(str(fault) if isinstance(fault, ModelError) else f"{model_version.folder} cannot be served: {said}")
