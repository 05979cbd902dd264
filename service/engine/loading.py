"""Loads and unloads model versions while the engine serves others. Models are prepared in a second thread.

A version is unloaded once no frontend may send a request for it and none of its sequences or sessions is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass

from service.engine.batching.batcher import Batcher
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.graph_capture import RunBetweenBatches
from service.engine.execution.served_models import PreparedModel
from service.engine.loader_thread import LoaderThread
from service.errors import InvalidModel, ModelError, NoRoom, ServiceError
from service.ipc.messages.control import CloseModel
from service.ipc.messages.models import ModelKey, ModelVersion
from service.log import Log

CHECK_SECONDS = 0.02
"""Interval of the checks whether a version that closes can be unloaded."""
CLOSING_SECONDS = 5.0
"""How long to wait until the frontends release a version. A frontend that is still silent then never knew the version."""


@dataclass(slots=True, eq=False)
class _ClosingVersion:
    """A version that will be unloaded.

    channels: of frontends that may still send requests for it, until `release_by`.
    end_sessions_at: when its open sessions end.
    """

    channels: set[Hashable]
    release_by: float
    end_sessions_at: float
    closed: Callable[[], None]


class ModelLoader:
    """Opens and closes model versions for the supervisor.

    `load` prepares a version in the loader thread. Calls `on_open` after it has opened a version, and `changed` after each change of the
    served versions.
    """

    def __init__(
        self,
        engine: DeviceEngine,
        batcher: Batcher,
        load: Callable[[ModelVersion, RunBetweenBatches], PreparedModel],
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._batcher = batcher
        self._load = load
        self._log = log
        self._clock = clock
        self._on_open = on_open
        self._loader = LoaderThread[PreparedModel]()
        self.closing: dict[ModelKey, _ClosingVersion] = {}
        """Versions that `settle` unloads when nothing uses them any more."""
        self._released: set[tuple[Hashable, ModelKey]] = set()
        self._loading: set[ModelKey] = set()
        """Versions in preparation that have not been closed."""
        self._next_check = 0.0
        self.changed: Callable[[], None] = lambda: None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `settle` has work."""
        return self._loader.fileno()

    def prepare(self, model_version: ModelVersion, on_prepared: Callable[[ServiceError | None], None]) -> None:
        """Load a version and serve it. Calls `on_prepared` with the error if it cannot be served, else with None."""

        def done(future: Future[PreparedModel]) -> None:
            error = future.exception()
            closed = model_version.key not in self._loading
            self._loading.discard(model_version.key)
            if error is None and not closed:
                self._engine.open(model_version.key, future.result())
                self._on_open()
                self._log.info(
                    "loaded", model=model_version.name, version=model_version.version, generation=model_version.generation
                )
                self.changed()
            on_prepared(None if error is None else report_load_error(model_version, error, self._log))

        self._loading.add(model_version.key)
        self._loader.begin(lambda: self._load(model_version, self._loader.between_batches), done)

    def release(self, channel: Hashable, key: ModelKey) -> None:
        """Note that the frontend of this channel sends no more requests for a version."""
        if key in self.closing:
            self.closing[key].channels.discard(channel)
        else:
            self._released.add((channel, key))

    def close(self, closing: CloseModel, channels: set[Hashable], closed: Callable[[], None]) -> None:
        """Unload a version once nothing of it is left and these channels have released it. Then calls `closed`.

        A version that is still loading will not be served: the supervisor has given it up.
        """
        key = closing.key
        if not self._engine.serves(key):
            self._loading.discard(key)
            closed()
            return
        unreleased = {channel for channel in channels if (channel, key) not in self._released}
        self._released = {(channel, released) for channel, released in self._released if released != key}
        now = self._clock()
        self.closing[key] = _ClosingVersion(unreleased, now + CLOSING_SECONDS, now + closing.seconds, closed)

    def forget(self, channel: Hashable) -> None:
        """Release all versions for a frontend that has ended."""
        self._released = {(released_by, key) for released_by, key in self._released if released_by is not channel}
        for closing in self.closing.values():
            closing.channels.discard(channel)

    def settle(self) -> None:
        """Open the versions that are prepared, and unload closing versions that nothing uses any more."""
        self._loader.settle()
        if not self.closing or (now := self._clock()) < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        for key, closing in list(self.closing.items()):
            if now >= closing.release_by:
                closing.channels.clear()
            if now >= closing.end_sessions_at:
                self._batcher.sessions.unload(key)
            if not closing.channels and not self._batcher.has(key):
                self._unload(key, closing)

    def _unload(self, key: ModelKey, closing: _ClosingVersion) -> None:
        del self.closing[key]
        self._batcher.close(key)
        self._engine.close(key)
        self._log.info("unloaded", model=key.name, version=key.version, generation=key.generation)
        self.changed()
        closing.closed()


def report_load_error(model_version: ModelVersion, error: BaseException, log: Log) -> ServiceError:
    """Log why a version cannot be served, and return the error for the supervisor."""
    description = f"{type(error).__name__}: {error}"
    log.error("not loaded", model=model_version.name, version=model_version.version, error=description)
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return NoRoom(
            f"not enough memory for {model_version.name} version {model_version.version} next to the models already served: "
            "unload another version"
        )
    return InvalidModel(
        str(error) if isinstance(error, ModelError) else f"{model_version.folder} cannot be served: {description}"
    )
