"""A store in Redis: a hash for each session, a key that expires for each lease, a list for each inbox.

Redis runs each change as one script. All keys have the same hash tag, so they are in one slot of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from service.errors import SettingsError
from service.ipc.messages.message import Message
from service.ipc.messages.store import DropSession, ReleaseSession, SaveSession, TakeOutcome, TakeSession
from service.settings import without_password
from service.store.records import (
    FORGOTTEN,
    FORGOTTEN_SECONDS,
    FORMAT_VERSION,
    INBOX_WAIT_SECONDS,
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

ANSWER_SECONDS = 1.0
"""How long Redis may take to answer."""
INBOX_SECONDS = 60
"""Notes for a replica that has ended expire."""
MAX_NOTES = 1000
FORGOTTEN_MS = round(FORGOTTEN_SECONDS * 1000)
PREFIX = "{seqserve}:"
_TAKE = """
local session, name, me, form, turn, begun = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local begins, replaces, may_seize, keep = ARGV[6] == '1', ARGV[7], ARGV[8] == '1', ARGV[9]
local there = redis.call('HMGET', session, 'form', 'owner', 'turn', 'begun', 'exact', 'ended', 'state')
local owner, ended = there[2] or '', there[6] or ''
if there[1] and tonumber(there[1]) > tonumber(form) then return {'newer'} end
if there[1] and owner ~= '' and owner ~= me then
  local inbox = KEYS[3] .. owner
  -- All leases end while Redis is stopped. This replica may seize a session only if it renewed its own since then.
  local is_alive = not may_seize or redis.call('EXISTS', KEYS[2] .. owner) == 1 or redis.call('EXISTS', KEYS[2] .. me) == 0
  redis.call('RPUSH', inbox, (is_alive and 'w' or 's') .. name)
  redis.call('EXPIRE', inbox, ARGV[10])
  if is_alive then
    redis.call('HSET', session, 'wanted', me)
    return {'held'}
  end
end
local is_begun
if not there[1] or ended == ARGV[11] then
  if not begins or (there[1] and replaces ~= '0') then return {'absent'} end
  is_begun = true
else
  is_begun = (replaces ~= '0' and there[3] == replaces) or (there[3] == turn and there[7] == '' and ended == '')
end
redis.call('HDEL', session, 'wanted')
if is_begun then
  redis.call('HSET', session, 'form', form, 'owner', me, 'turn', turn, 'begun', begun, 'exact', '0', 'ended', '', 'state', '')
  redis.call('PEXPIRE', session, keep)
  return {'new'}
end
redis.call('PEXPIRE', session, keep)
if ended == '' and there[7] == '' then ended = 'lost' end
redis.call('HSET', session, 'form', form, 'owner', me, 'turn', turn, 'exact', '0', 'ended', ended)
if ended ~= '' then return {'ended', ended} end
return {'taken', there[4], there[5], there[7]}
"""
"""KEYS: the session, the prefixes of leases and of inboxes. ARGV: its name, this replica, the form, the turn, when it begins, begins, the
turn that it replaces, may_seize, milliseconds to keep it, seconds to keep a note, FORGOTTEN."""
_SAVE = """
local session, name, me, form, turn, begun = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local releases, anew = ARGV[7] == '1', ARGV[8] == '1'
local there = redis.call('HMGET', session, 'form', 'owner', 'turn', 'begun', 'wanted')
if there[1] then
  if tonumber(there[1]) > tonumber(form) then return 0 end
  if there[3] ~= turn then
    if not (anew and tonumber(there[4]) < tonumber(begun)) then return 0 end
    if there[2] ~= '' and there[2] ~= me then
      redis.call('RPUSH', KEYS[2] .. there[2], 's' .. name)
      redis.call('EXPIRE', KEYS[2] .. there[2], ARGV[10])
    end
  end
end
redis.call('HSET', session, 'form', form, 'owner', releases and '' or me, 'turn', turn, 'begun', begun, 'exact', ARGV[6], 'ended', '',
  'state', ARGV[11])
redis.call('PEXPIRE', session, ARGV[9])
if releases and there[5] then
  redis.call('HDEL', session, 'wanted')
  redis.call('RPUSH', KEYS[2] .. there[5], 'r' .. name)
  redis.call('EXPIRE', KEYS[2] .. there[5], ARGV[10])
end
return 1
"""
"""KEYS: the session, the prefix of inboxes. ARGV: its name, this replica, the form, the turn, when it began, exact, releases, anew,
milliseconds to keep it, seconds to keep a note, the state."""
_RELEASE = """
local there = redis.call('HMGET', KEYS[1], 'owner', 'turn', 'state', 'wanted', 'ended')
if there[1] ~= ARGV[2] or (ARGV[3] ~= '0' and ARGV[3] ~= there[2]) then return 0 end
if there[3] ~= '' or there[5] ~= '' then
  redis.call('HSET', KEYS[1], 'owner', '', 'exact', ARGV[4])
else
  redis.call('HSET', KEYS[1], 'owner', '', 'turn', '0', 'ended', ARGV[6])
  redis.call('PEXPIRE', KEYS[1], ARGV[7])
end
if there[4] then
  redis.call('HDEL', KEYS[1], 'wanted')
  redis.call('RPUSH', KEYS[2] .. there[4], 'r' .. ARGV[1])
  redis.call('EXPIRE', KEYS[2] .. there[4], ARGV[5])
end
return 1
"""
"""KEYS: the session, the prefix of inboxes. ARGV: its name, this replica, the turn, exact, seconds to keep a note, how a session without a
state has ended, milliseconds to keep that."""
_DROP = """
if redis.call('HGET', KEYS[1], 'turn') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'owner', '', 'turn', '0', 'ended', ARGV[2], 'state', '')
redis.call('HDEL', KEYS[1], 'wanted')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
"""KEYS: the session. ARGV: the turn, why the session ended, milliseconds to keep that."""
_SCRIPTS: dict[type[Message], str] = {TakeSession: _TAKE, SaveSession: _SAVE, ReleaseSession: _RELEASE, DropSession: _DROP}


class RedisStore:
    """The records of one replica in Redis."""

    def __init__(self, url: str, replica: str, keep_seconds: float) -> None:
        """Raises SettingsError without the redis package."""
        try:
            import redis
        except ImportError:
            raise SettingsError(
                f"SEQSERVE_SESSION_STORE is {without_password(url)} and needs a missing package: pip install 'seqserve[redis]'"
            ) from None
        # UnicodeError: a host name that is none is only noticed when it is looked up.
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, UnicodeError)
        self._unknown_script: type[Exception] = redis.exceptions.NoScriptError
        try:
            self._client: Any = redis.Redis.from_url(url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
            self._client.connection_pool.make_connection()
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"SEQSERVE_SESSION_STORE is {without_password(url)!r}, which is no URL of a Redis server: {without_password(str(error))}"
            ) from None
        # Its only command waits for a note.
        self._inbox_client: Any = redis.Redis.from_url(
            url, socket_timeout=INBOX_WAIT_SECONDS + ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS
        )
        self._scripts = {kind: self._client.register_script(text) for kind, text in _SCRIPTS.items()}
        self._replica = replica
        self._keep_ms = max(1, round(keep_seconds * 1000))

    def apply(self, changes: Sequence[Change], *, may_seize: bool) -> list[Result]:
        commands = [self._command(change, may_seize) for change in changes]
        try:
            results = self._run(commands)
            missing = [index for index, result in enumerate(results) if isinstance(result, self._unknown_script)]
            if missing:
                for script in self._scripts.values():
                    self._client.script_load(script.script)
                for index, result in zip(missing, self._run([commands[index] for index in missing]), strict=True):
                    results[index] = result
        except self._errors as error:
            return [StoreFailed(str(error))] * len(changes)
        return [self._result(change, result) for change, result in zip(changes, results, strict=True)]

    def renew(self) -> bool:
        with failing(*self._errors):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.exists(self._lease)
            pipeline.set(self._lease, 1, px=round(LEASE_SECONDS * 1000))
            existed, _ = pipeline.execute()
        return bool(existed)

    def read_inbox(self, seconds: float) -> list[Note]:
        with failing(*self._errors):
            first = self._inbox_client.blpop(self._inbox, timeout=seconds)
            if first is None:
                return []
            return [*_notes([first[1], *(self._client.lpop(self._inbox, MAX_NOTES) or ())])]

    def sweep(self) -> None:
        """Redis does it."""

    def end(self) -> None:
        with failing(*self._errors):
            self._client.delete(self._lease, self._inbox)

    @property
    def _lease(self) -> str:
        return f"{PREFIX}lease:{self._replica}"

    @property
    def _inbox(self) -> str:
        return f"{PREFIX}inbox:{self._replica}"

    def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send all commands in one round trip."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.evalsha(*command)
        results: list[Any] = pipeline.execute(raise_on_error=False)
        return results

    def _command(self, change: Change, may_seize: bool) -> tuple[Any, ...]:
        """Return the arguments of EVALSHA."""
        message = change.message
        script, key, inboxes = self._scripts[type(message)].sha, f"{PREFIX}session:{digest(message.session)}", f"{PREFIX}inbox:"
        match message:
            case TakeSession(session=name, ownership=turn, begun=begun, begins=begins, replaces=replaces):
                options = int(begins), replaces, int(may_seize), self._keep_ms, INBOX_SECONDS, FORGOTTEN
                return script, 3, key, f"{PREFIX}lease:", inboxes, name, self._replica, FORMAT_VERSION, turn, begun, *options
            case SaveSession(session=name, ownership=turn, begun=begun, exact=exact, releases=releases, anew=anew):
                flags = int(exact), int(releases), int(anew)
                state = self._keep_ms, INBOX_SECONDS, change.state
                return script, 2, key, inboxes, name, self._replica, FORMAT_VERSION, turn, begun, *flags, *state
            case ReleaseSession(session=name, ownership=turn, exact=exact):
                end = (FORGOTTEN, FORGOTTEN_MS) if turn else ("lost", self._keep_ms)
                return script, 2, key, inboxes, name, self._replica, turn, int(exact), INBOX_SECONDS, *end
            case DropSession(ownership=turn, ended=ended):
                return script, 1, key, turn, ended or FORGOTTEN, self._keep_ms if ended else FORGOTTEN_MS

    @staticmethod
    def _result(change: Change, result: Any) -> Result:
        if isinstance(result, Exception):
            return StoreFailed(str(result))
        if not isinstance(change.message, TakeSession):
            return bool(result)
        try:
            return _taken(result)
        except (TypeError, ValueError) as error:
            return StoreFailed(f"a record is damaged: {error}")


def _taken(result: Any) -> TakenSession:
    """Return the outcome that the script returned. Raises TypeError or ValueError for a record that was written by something else."""
    outcome, values = TakeOutcome(result[0].decode()), result[1:]
    if outcome is TakeOutcome.TAKEN:
        begun, exact, state = values
        return TakenSession(outcome, int(begun), exact == b"1", state=state)
    return TakenSession(outcome, ended=values[0].decode() if values else "")


def _notes(entries: Sequence[bytes]) -> Iterator[Note]:
    """Yield the notes of known kinds: a later version may have more."""
    for entry in entries:
        with suppress(ValueError):
            yield Note(NoteKind(entry[:1].decode()), entry[1:].decode())
