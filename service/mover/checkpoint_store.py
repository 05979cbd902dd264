"""Where checkpoints of sessions are kept: a folder that all replicas share, or a Redis server. The functions block.

A session has one checkpoint: the newest state by (begun, steps), whichever replica saved it, and in whatever order the states arrive.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from service.errors import SettingsError
from service.settings import Settings

DIGEST_BYTES = 16
"""Size of the digest of a session's name, which may have characters that a file name cannot have."""
CHECK_BYTES = 32
"""Size of the digest before a state: a file that was torn by a crash of its machine is not taken for a state."""
REDIS_SECONDS = 2.0
PREFIX = "seqserve:session:"


class Checkpoint(NamedTuple):
    """A state as a session file. A later state has larger `begun` and `steps`, compared in this order."""

    begun: int
    steps: int
    state: bytes


class StoreFailed(Exception):
    """The store does not answer, or cannot be written."""


class Store(Protocol):
    """Keeps checkpoints. Every function raises StoreFailed."""

    def save(self, session: str, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, unless a later checkpoint is there."""

    def find(self, session: str) -> Checkpoint | None:
        """Return the checkpoint of a session."""

    def drop(self, session: str, begun: int) -> None:
        """Remove the checkpoint of a session, unless it is of a session that began later."""

    def sweep(self) -> None:
        """Remove checkpoints that are too old."""


def open_store(settings: Settings) -> Store:
    """Return the store of the setting `checkpoints`; raises SettingsError."""
    # The last chunk of a session may come this long after its checkpoint.
    keep_seconds = settings.session_idle_seconds * (settings.checkpoint_chunks + 1)
    if "://" in settings.checkpoints:
        return RedisStore(settings.checkpoints, keep_seconds)
    return FolderStore(Path(settings.checkpoints), keep_seconds)


class FolderStore:
    """One file for each session. Its name contains the order, so no lock is needed: the largest name counts."""

    def __init__(self, folder: Path, keep_seconds: float) -> None:
        """Raises SettingsError for a folder that cannot be written."""
        self._folder = folder
        self._keep_seconds = keep_seconds
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f".{secrets.token_hex(8)}").touch()
            for probe in folder.glob(".*"):
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(f"checkpoints cannot be written to {folder}: {error}") from None

    def save(self, session: str, checkpoint: Checkpoint) -> None:
        name = _digest(session)
        final = self._place(name) / f"{name}.{checkpoint.begun:016x}.{checkpoint.steps:016x}"
        try:
            present = self._files(name)
            if present and present[-1].name >= final.name:
                return
            final.parent.mkdir(exist_ok=True)
            unfinished = final.parent / f".{secrets.token_hex(8)}"
            unfinished.write_bytes(_check(checkpoint.state) + checkpoint.state)
            unfinished.replace(final)
            for older in present:
                older.unlink(missing_ok=True)
        except OSError as error:
            raise StoreFailed(str(error)) from None

    def find(self, session: str) -> Checkpoint | None:
        try:
            # Another replica may remove a file here when it has saved a newer one.
            for _ in range(3):
                for file in reversed(self._files(_digest(session))):
                    with suppress(FileNotFoundError):
                        data = file.read_bytes()
                        begun, steps = (int(part, 16) for part in file.name.split(".")[1:])
                        if data[:CHECK_BYTES] == _check(data[CHECK_BYTES:]):
                            return Checkpoint(begun, steps, data[CHECK_BYTES:])
        except OSError as error:
            raise StoreFailed(str(error)) from None
        return None

    def drop(self, session: str, begun: int) -> None:
        try:
            for file in self._files(_digest(session)):
                if int(file.name.split(".")[1], 16) <= begun:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise StoreFailed(str(error)) from None

    def sweep(self) -> None:
        now = time.clock_gettime(time.CLOCK_REALTIME)
        try:
            for file in self._folder.glob("[0-9a-f][0-9a-f]/*"):
                with suppress(FileNotFoundError):
                    if now - file.stat().st_mtime > self._keep_seconds:
                        file.unlink()
        except OSError as error:
            raise StoreFailed(str(error)) from None

    def _place(self, name: str) -> Path:
        return self._folder / name[:2]

    def _files(self, name: str) -> list[Path]:
        """Return the files of a session, the newest last."""
        with suppress(FileNotFoundError):
            return sorted(self._matching(name))
        return []

    def _matching(self, name: str) -> Iterator[Path]:
        folder = self._place(name)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(name):
                    yield folder / entry.name


_SAVE = """
local there = redis.call('HMGET', KEYS[1], 'begun', 'steps')
local begun, steps = tonumber(there[1] or -1), tonumber(there[2] or -1)
if begun > tonumber(ARGV[1]) or (begun == tonumber(ARGV[1]) and steps >= tonumber(ARGV[2])) then return 0 end
redis.call('HSET', KEYS[1], 'begun', ARGV[1], 'steps', ARGV[2], 'state', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""
_DROP = """
local begun = tonumber(redis.call('HGET', KEYS[1], 'begun') or -1)
if begun >= 0 and begun <= tonumber(ARGV[1]) then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisStore:
    """One hash for each session. Redis compares and writes in one script, and expires old checkpoints."""

    def __init__(self, url: str, keep_seconds: float) -> None:
        """Raises SettingsError without the redis package."""
        try:
            import redis
        except ImportError:
            raise SettingsError(
                f"SEQSERVE_CHECKPOINTS is {url} and needs a package that is not installed: pip install 'seqserve[redis]'"
            ) from None
        self._error: type[Exception] = redis.RedisError
        self._client: Any = redis.Redis.from_url(url, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS)
        self._save = self._client.register_script(_SAVE)
        self._drop = self._client.register_script(_DROP)
        self._keep_ms = max(1, round(keep_seconds * 1000))

    def save(self, session: str, checkpoint: Checkpoint) -> None:
        try:
            self._save(keys=[_key(session)], args=[*checkpoint, self._keep_ms])
        except self._error as error:
            raise StoreFailed(str(error)) from None

    def find(self, session: str) -> Checkpoint | None:
        try:
            begun, steps, state = self._client.hmget(_key(session), "begun", "steps", "state")
        except self._error as error:
            raise StoreFailed(str(error)) from None
        return None if state is None else Checkpoint(int(begun), int(steps), state)

    def drop(self, session: str, begun: int) -> None:
        try:
            self._drop(keys=[_key(session)], args=[begun])
        except self._error as error:
            raise StoreFailed(str(error)) from None

    def sweep(self) -> None:
        """Redis does it."""


def _key(session: str) -> str:
    return PREFIX + _digest(session)


def _digest(session: str) -> str:
    return blake2b(session.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _check(state: bytes) -> bytes:
    return blake2b(state, digest_size=CHECK_BYTES).digest()
