"""A store in a folder: a file for each session, and a folder for each replica with its lease and its inbox.

A change locks the folder of its session, which has a 256th of all sessions. A file is replaced as a whole, and its header has a digest of
the state: a file that was torn by a crash of its machine has no state. Times are those of the file system, which all replicas share.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from service.errors import SettingsError
from service.ipc.messages.store import DropSession, ReleaseSession, SaveSession, TakeOutcome, TakeSession
from service.store.records import (
    FORGOTTEN,
    FORGOTTEN_SECONDS,
    FORMAT_VERSION,
    LEASE_SECONDS,
    Change,
    Note,
    NoteKind,
    Result,
    StoreFailed,
    TakenSession,
    digest,
    failing,
)

LOCK_SECONDS = 0.1
"""How long another replica may hold a lock: it may be stopped, and then changes of this part fail, one after the other."""
LOCK_PAUSE_SECONDS = 0.002
INBOX_PAUSE_SECONDS = 0.01
CHECK_BYTES = 16
PARTS = 256
"""Folders with a part of the sessions each."""
_HEADER_END = b"\n"
_NOTES = tuple(kind.value for kind in NoteKind)


class _Record(msgspec.Struct, omit_defaults=True):
    """The header of a session's file. owner: empty if it is free. turn: of the last ownership. wanted: who waits for the session."""

    form: int
    owner: str = ""
    turn: int = 0
    begun: int = 0
    exact: bool = False
    ended: str = ""
    wanted: str = ""
    check: str = ""


_DECODER = msgspec.json.Decoder(_Record)


class FolderStore:
    """The records of one replica in a folder."""

    def __init__(self, folder: Path, replica: str, keep_seconds: float) -> None:
        """Raises SettingsError for a folder that cannot be written."""
        self._sessions, self._replicas = folder / "sessions", folder / "replicas"
        self._replica = replica
        self._keep_seconds = keep_seconds
        try:
            self._mine.mkdir(parents=True, exist_ok=True)
            for number in range(PARTS):
                (self._sessions / f"{number:02x}").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"sessions cannot be saved in {folder} (SEQSERVE_SESSION_STORE): {error}") from None

    def apply(self, changes: Sequence[Change], *, may_seize: bool) -> list[Result]:
        return [self._apply(change, may_seize) for change in changes]

    @failing(OSError)
    def renew(self) -> bool:
        lease = self._mine / "lease"
        before = lease.stat().st_mtime if lease.exists() else 0.0
        self._mine.mkdir(parents=True, exist_ok=True)
        lease.touch()
        return abs(lease.stat().st_mtime - before) < LEASE_SECONDS

    @failing(OSError)
    def read_inbox(self, seconds: float) -> list[Note]:
        until = time.monotonic() + seconds
        while not (notes := list(self._notes())) and time.monotonic() < until:
            time.sleep(INBOX_PAUSE_SECONDS)
        return notes

    @failing(OSError)
    def sweep(self) -> None:
        now = self._now()
        for number in range(PARTS):
            folder = self._sessions / f"{number:02x}"
            with suppress(TimeoutError), _locked(str(folder)):
                for file in folder.iterdir():
                    with suppress(OSError):  # what else lies in the folder stays
                        if file.name != ".lock" and self._is_old(file, now):
                            file.unlink()
        for replica in self._replicas.iterdir():
            with suppress(FileNotFoundError, NotADirectoryError):
                if now - replica.stat().st_mtime > self._keep_seconds and not self._is_alive(replica.name):
                    shutil.rmtree(replica)

    @failing(OSError)
    def end(self) -> None:
        shutil.rmtree(self._mine)

    # Changes.

    def _apply(self, change: Change, may_seize: bool) -> Result:
        name = digest(change.message.session)
        folder = f"{self._sessions}/{name[:2]}"
        file = f"{folder}/{name}"
        try:
            with _locked(folder):
                match change.message:
                    case TakeSession():
                        return self._take(file, change.message, may_seize)
                    case SaveSession():
                        return self._save(file, change.message, change.state)
                    case ReleaseSession():
                        return self._release(file, change.message)
                    case DropSession():
                        return self._drop(file, change.message)
        except Exception as error:  # whatever a damaged file has
            return StoreFailed(f"{name}: {error}")

    def _take(self, file: str, message: TakeSession, may_seize: bool) -> TakenSession:
        record, state = _read(file)
        if record is not None and record.form > FORMAT_VERSION:
            return TakenSession(TakeOutcome.NEWER)
        if record is not None and record.owner not in ("", self._replica):
            if not may_seize or self._is_alive(record.owner):
                if record.wanted != self._replica:
                    record.wanted = self._replica
                    _write(file, record, state)
                self._leave_note(record.owner, NoteKind.WANTED, message.session)
                return TakenSession(TakeOutcome.HELD)
            self._leave_note(record.owner, NoteKind.SEIZED, message.session)
        if record is None or record.ended == FORGOTTEN:
            # Only a store that has lost its data begins a session anew that it does not know.
            if not message.begins or (record is not None and message.replaces):
                return TakenSession(TakeOutcome.ABSENT)
        elif not ((message.replaces and record.turn == message.replaces) or _is_begun(record, state, message)):
            ended = record.ended or ("" if state else "lost")
            _write(file, _Record(FORMAT_VERSION, self._replica, message.ownership, record.begun, ended=ended), state)
            if ended:
                return TakenSession(TakeOutcome.ENDED, ended=ended)
            return TakenSession(TakeOutcome.TAKEN, record.begun, record.exact, state=state)
        _write(file, _Record(FORMAT_VERSION, self._replica, message.ownership, message.begun), b"")
        return TakenSession(TakeOutcome.NEW)

    def _save(self, file: str, message: SaveSession, state: bytes) -> bool:
        record, _ = _read(file)
        wanted = ""
        if record is not None:
            if record.form > FORMAT_VERSION:
                return False
            if record.turn != message.ownership:
                if not (message.anew and record.begun < message.begun):
                    return False
                if record.owner != self._replica:
                    self._leave_note(record.owner, NoteKind.SEIZED, message.session)
            wanted = record.wanted
        saved = _Record(FORMAT_VERSION, self._replica, message.ownership, message.begun, message.exact, wanted=wanted)
        if message.releases:
            saved.owner = saved.wanted = ""
        _write(file, saved, state)
        if message.releases and wanted:
            self._leave_note(wanted, NoteKind.RELEASED, message.session)
        return True

    def _release(self, file: str, message: ReleaseSession) -> bool:
        record, state = _read(file)
        if record is None or record.owner != self._replica or message.ownership not in (0, record.turn):
            return False
        wanted, record.owner, record.wanted, record.exact = record.wanted, "", "", message.exact
        if state or record.ended:
            _write(file, record, state)
        else:
            _forget(file, record, "" if message.ownership else "lost")
        if wanted:
            self._leave_note(wanted, NoteKind.RELEASED, message.session)
        return True

    def _drop(self, file: str, message: DropSession) -> bool:
        record, _ = _read(file)
        if record is None or record.turn != message.ownership:
            return False
        _forget(file, record, message.ended)
        return True

    def _is_old(self, file: Path, now: float) -> bool:
        age = now - file.stat().st_mtime
        if FORGOTTEN_SECONDS < age <= self._keep_seconds:
            with suppress(msgspec.DecodeError):
                record, _ = _read(str(file))
                return record is not None and record.ended == FORGOTTEN
        return age > self._keep_seconds

    # Replicas.

    @property
    def _mine(self) -> Path:
        return self._replicas / self._replica

    def _now(self) -> float:
        """Return the time of the file system at which this replica renewed its lease last."""
        with suppress(FileNotFoundError):
            return (self._mine / "lease").stat().st_mtime
        return 0.0

    def _is_alive(self, replica: str) -> bool:
        """Return whether a replica has a lease, as far as this replica can know: it needs one to tell the time."""
        now = self._now()
        try:
            # The clock of the file system may be set back.
            return not now or abs(now - (self._replicas / replica / "lease").stat().st_mtime) < LEASE_SECONDS
        except FileNotFoundError:
            return not now

    def _leave_note(self, replica: str, kind: NoteKind, session: str) -> None:
        """Leave a note in the inbox of a replica, if it can be written: a note only saves the time until the next look."""
        if not replica:
            return
        note = self._replicas / replica / f"{kind}{digest(session)}"
        unfinished = self._replicas / replica / f".{secrets.token_hex(8)}"
        with suppress(OSError):
            unfinished.write_text(session)
            unfinished.replace(note)

    def _notes(self) -> Iterator[Note]:
        with os.scandir(self._mine) as entries:
            files = [Path(entry.path) for entry in entries if entry.name[0] in _NOTES and entry.is_file(follow_symlinks=False)]
        for file in files:
            session = file.read_text(errors="replace")
            file.unlink()
            yield Note(NoteKind(file.name[0]), session)


# A store has a hundred thousand files, and a path object would cost as much as the system calls: paths are texts here.


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock a folder of sessions. Raises TimeoutError if another replica does not give its lock back."""
    until = time.monotonic() + LOCK_SECONDS
    lock = os.open(f"{folder}/.lock", os.O_CREAT | os.O_RDWR)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"another replica has locked {folder} for longer than {LOCK_SECONDS:g} s") from None
                time.sleep(LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(lock)


def _read(file: str) -> tuple[_Record | None, bytes]:
    """Return the record and the state of a session, and no state for a torn file."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None, b""
    try:
        content = os.read(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    header, _, state = content.partition(_HEADER_END)
    try:
        record = _DECODER.decode(header)
    except msgspec.ValidationError:
        raise  # a later form
    except msgspec.DecodeError:
        return _Record(FORMAT_VERSION), b""
    return record, state if record.check == _check(state) else b""


def _is_begun(record: _Record, state: bytes, message: TakeSession) -> bool:
    """Return whether a take was made before, without a reply."""
    return record.turn == message.ownership and not (state or record.ended)


def _forget(file: str, record: _Record, ended: str = "") -> None:
    """Record that a session has ended, and why if its client does not know. Nobody owns it any more."""
    _write(file, _Record(FORMAT_VERSION, begun=record.begun, ended=ended or FORGOTTEN), b"")


def _write(file: str, record: _Record, state: bytes) -> None:
    """Replace the file of a session as a whole."""
    record.check = _check(state)
    header = msgspec.json.encode(record) + _HEADER_END
    unfinished = f"{file}.new"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        if os.writev(descriptor, (header, state)) < len(header) + len(state):
            raise OSError(errno.ENOSPC, "the folder has no room for the state", file)
    finally:
        os.close(descriptor)
    os.replace(unfinished, file)


def _check(state: bytes) -> str:
    return blake2b(state, digest_size=CHECK_BYTES).hexdigest() if state else ""
