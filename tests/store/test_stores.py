"""What each store promises, a folder and Redis alike: one owner, one saved history, notes to other replicas."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadtest.servers import free_ports
from service.errors import SettingsError
from service.ipc.messages.store import DropSession, ReleaseSession, SaveSession, TakeOutcome, TakeSession
from service.settings import Settings
from service.store import folder, redis_store
from service.store.__main__ import open_store
from service.store.folder import FolderStore
from service.store.records import (
    FORGOTTEN_SECONDS,
    FORMAT_VERSION,
    LEASE_SECONDS,
    Change,
    Note,
    NoteKind,
    Result,
    Store,
    StoreFailed,
    TakenSession,
    digest,
)
from service.store.redis_store import RedisStore
from tests.serving import eventually
from tests.store.redis_server import Redis, running_redis

KEEP_SECONDS = 3600.0
NEW, ABSENT, HELD = TakenSession(TakeOutcome.NEW), TakenSession(TakeOutcome.ABSENT), TakenSession(TakeOutcome.HELD)
Open = Callable[[str], Store]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["folder", "redis"])
def open_replica(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the store of a replica that has a lease."""
    if request.param == "redis":
        server: Redis = request.getfixturevalue("redis")
        server.stop()
        server.start()

    def open_named(replica: str) -> Store:
        store: Store = FolderStore(tmp_path, replica, KEEP_SECONDS)
        if request.param == "redis":
            store = RedisStore(server.url, replica, KEEP_SECONDS)
        store.renew()
        return store

    return open_named


def apply(store: Store, message: TakeSession | SaveSession | ReleaseSession | DropSession, state: bytes = b"") -> Result:
    [result] = store.apply([Change(message, state)], may_seize=True)
    return result


def begin(store: Store, turn: int = 1, begun: int = 5) -> None:
    assert apply(store, TakeSession("s", turn, begun, begins=True)) == NEW


def take(store: Store, turn: int = 2) -> Result:
    """Take a session that must exist."""
    return apply(store, TakeSession("s", turn, 9, begins=False))


def save(store: Store, state: bytes, turn: int = 1, *, releases: bool = False) -> Result:
    return apply(store, SaveSession("s", turn, 5, releases, releases), state)


def taken(state: bytes, begun: int = 5, *, exact: bool = False) -> TakenSession:
    return TakenSession(TakeOutcome.TAKEN, begun, exact, state=state)


def test_released_session_continues_at_another_replica(open_replica: Open) -> None:
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    assert take(second) == HELD
    assert first.read_inbox(1.0) == [Note(NoteKind.WANTED, "s")]
    assert save(first, b"state", releases=True) is True
    assert second.read_inbox(1.0) == [Note(NoteKind.RELEASED, "s")]
    assert take(second) == taken(b"state", exact=True)
    assert save(first, b"late") is False, "it is no longer the owner"
    assert take(second) == taken(b"state"), "chunks may have been answered since"


def test_release_that_is_sent_again_changes_nothing_later(open_replica: Open) -> None:
    """Its first result was lost. It may be made twice, unless another replica has taken the session since."""
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    for _ in range(2):
        assert save(first, b"state", releases=True) is True
    assert take(second, 2) == taken(b"state", exact=True)
    assert save(second, b"newer", 2, releases=True) is True
    assert save(first, b"state", releases=True) is False
    assert take(first, 3) == taken(b"newer", exact=True)
    assert save(first, b"state", 1, releases=True) is False, "the same replica has taken it again"
    assert apply(first, DropSession("s", 3)) is True
    assert save(first, b"state", 3, releases=True) is False, "an ended session does not come back"
    assert take(second) == ABSENT


def test_session_of_a_replica_without_a_lease_is_seized(open_replica: Open) -> None:
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    save(first, b"state")
    first.end()
    assert second.apply([Change(TakeSession("s", 2, 9, begins=False))], may_seize=False) == [HELD]
    assert take(second) == taken(b"state")
    assert save(first, b"late") is False
    assert apply(first, DropSession("s", 1)) is False
    assert apply(first, ReleaseSession("s", 1)) is False
    assert apply(second, DropSession("s", 2)) is True
    assert save(first, b"late") is False, "an earlier owner cannot bring an ended session back"
    assert take(second) == ABSENT


def test_only_the_owner_begins_a_session_anew(open_replica: Open) -> None:
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    save(first, b"state")
    assert apply(second, TakeSession("s", 2, 9, True, replaces=1)) == HELD
    assert apply(first, TakeSession("s", 3, 9, True, replaces=1)) == NEW
    assert save(first, b"late") is False, "the state of the earlier session"
    assert save(first, b"newer", 3) is True
    assert apply(first, TakeSession("s", 4, 9, True, replaces=1)) == taken(b"newer"), "a copy of an earlier ownership"
    assert apply(first, DropSession("s", 4)) is True
    assert apply(first, TakeSession("s", 5, 9, True, replaces=4)) == ABSENT


def test_end_is_kept_until_a_client_has_learned_it(open_replica: Open) -> None:
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    apply(first, DropSession("s", 1, "expired"))
    expired = TakenSession(TakeOutcome.ENDED, ended="expired")
    for _ in range(2):
        assert apply(second, TakeSession("s", 2, 9, True)) == expired, "the reply was lost"
    assert apply(second, ReleaseSession("s", 2)) is True
    assert apply(first, TakeSession("s", 3, 9, True)) == expired
    assert apply(first, TakeSession("s", 4, 9, True, replaces=3)) == NEW


def test_take_that_is_sent_again_has_the_same_outcome(open_replica: Open) -> None:
    """The process of the store may end before it replies."""
    store = open_replica("first")
    for _ in range(2):
        begin(store)
    save(store, b"state", releases=True)
    take(store, 2)
    assert take(store, 2) == taken(b"state")


def test_replica_that_returns_learns_what_was_seized(open_replica: Open) -> None:
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    save(first, b"state")
    eventually(lambda: second.renew() and take(second) == taken(b"state"), 2 * LEASE_SECONDS + 5)
    notes = first.read_inbox(1.0)
    assert Note(NoteKind.SEIZED, "s") in notes


def random_change(chance: random.Random) -> TakeSession | SaveSession | ReleaseSession | DropSession:
    name, turn, begun = chance.choice("xy"), chance.randint(1, 6), chance.randint(1, 9)
    flags = [chance.random() < 0.5 for _ in range(3)]
    changes: list[TakeSession | SaveSession | ReleaseSession | DropSession] = [
        TakeSession(name, turn, begun, flags[0], chance.choice([0, 0, chance.randint(1, 6)])),
        SaveSession(name, turn, begun, *flags),
        ReleaseSession(name, turn * flags[0], flags[1]),
        DropSession(name, turn, chance.choice(["", "expired"])),
    ]
    return chance.choice(changes)


@pytest.mark.parametrize("seed", range(4))
def test_both_stores_follow_the_same_rules(seed: int, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (folder, redis_store):
        monkeypatch.setattr(module, "LEASE_SECONDS", 3600.0)
    redis.stop()
    redis.start()
    chance = random.Random(seed)
    stores = {
        replica: (FolderStore(tmp_path, replica, KEEP_SECONDS), RedisStore(redis.url, replica, KEEP_SECONDS))
        for replica in "abc"
    }
    alive = set[str]()
    for _ in range(300):
        replica, change = chance.choice("abc"), Change(random_change(chance), chance.randbytes(4))
        may_seize = chance.random() < 0.7
        pair = stores[replica]
        if chance.random() < 0.1:
            for store in pair:
                if replica in alive:
                    store.end()
                else:
                    store.renew()
                    store.read_inbox(0.01)  # Redis keeps notes for a replica that has ended
            alive ^= {replica}
        elif chance.random() < 0.2 and replica in alive:
            notes_in_folder, notes_in_redis = (set(store.read_inbox(0.01)) for store in pair)
            assert notes_in_folder == notes_in_redis
        else:
            [by_folder], [by_redis] = (store.apply([change], may_seize=may_seize) for store in pair)
            assert by_folder == by_redis, change


def test_session_that_was_never_saved_is_lost_with_its_owner(open_replica: Open) -> None:
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    first.end()
    assert take(second) == TakenSession(TakeOutcome.ENDED, ended="lost")
    assert apply(second, DropSession("s", 2)) is True
    assert take(second) == ABSENT, "that is reported once"


def test_session_that_began_without_the_store_replaces_an_older_one(open_replica: Open) -> None:
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    assert apply(second, SaveSession("s", 2, 4, anew=True), b"older") is False
    assert apply(second, SaveSession("s", 2, 6, anew=True), b"newer") is True
    assert first.read_inbox(1.0) == [Note(NoteKind.SEIZED, "s")]
    assert save(first, b"late") is False
    assert apply(second, SaveSession("t", 3, 6), b"state") is True, "a store that lost its data gets it again"


def test_claim_is_given_back(open_replica: Open) -> None:
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    assert apply(second, ReleaseSession("s", 1)) is False
    assert apply(first, ReleaseSession("s", 1)) is True
    assert take(second) == ABSENT
    begin(first, 2)
    save(first, b"state", 2)
    assert apply(first, ReleaseSession("s", 2, exact=True)) is True
    assert take(second, 3) == taken(b"state", exact=True)


@pytest.mark.parametrize(("state", "left"), [(b"state", taken(b"state")), (b"", TakenSession(TakeOutcome.ENDED, ended="lost"))])
def test_engine_that_has_crashed_gives_up_what_it_had(open_replica: Open, state: bytes, left: TakenSession) -> None:
    """The next engine of this replica does not know the ownership of the session."""
    first, second = open_replica("first"), open_replica("second")
    begin(first)
    if state:
        save(first, state)
    assert apply(second, ReleaseSession("s")) is False
    assert apply(first, ReleaseSession("s")) is True
    assert take(second) == left


@pytest.mark.parametrize("name", ["a\x1ftenant / ..", "ö" * 100])
def test_names_and_states_have_any_bytes(open_replica: Open, name: str) -> None:
    store, state = open_replica("first"), bytes(range(256)) * 1000
    apply(store, SaveSession(name, 1, 5), state)
    assert apply(store, TakeSession(name, 2, 9, begins=False)) == taken(state)


def test_rolling_update_reads_earlier_forms_and_spares_later_ones(open_replica: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica of the next version takes sessions of this one. This one leaves the records of the next version alone."""
    old, new = open_replica("old"), open_replica("new")
    begin(old)
    save(old, b"state", releases=True)
    with monkeypatch.context() as later:
        for module in (folder, redis_store):
            later.setattr(module, "FORMAT_VERSION", FORMAT_VERSION + 1)
        assert take(new) == taken(b"state", exact=True)
        assert save(new, b"next", 2, releases=True) is True
    assert take(old) == TakenSession(TakeOutcome.NEWER)
    assert apply(old, SaveSession("s", 3, 9, anew=True), b"late") is False


@pytest.mark.parametrize(
    "content", [-1, 10, 0, b"\xff\xfe\n", b"[" * 100_000, b"5\n", b'{"form": 1, "turn": 1, "begun": "x"}\n'], ids=repr
)
def test_torn_or_damaged_file_is_no_state_and_fails_alone(content: int | bytes, tmp_path: Path) -> None:
    """A file that is torn ends its session. Other bytes may have been written by something else."""
    store = FolderStore(tmp_path, "first", KEEP_SECONDS)
    save(store, b"whole")
    [file] = tmp_path.glob("sessions/*/[0-9a-f]*")
    file.write_bytes(file.read_bytes()[:content] if isinstance(content, int) else content)
    assert apply(store, SaveSession("t", 1, 5), b"") is True
    taken = take(store)
    if isinstance(content, int):
        assert taken == TakenSession(TakeOutcome.ENDED, ended="lost")
        assert apply(store, SaveSession("s", 2, 6, anew=True), b"new") is True
    assert isinstance(taken, StoreFailed | TakenSession)


def test_what_is_no_file_of_a_session_stays(tmp_path: Path) -> None:
    """A pipe does not stop the store, and a link is not followed."""
    store = FolderStore(tmp_path, "first", KEEP_SECONDS)
    store.renew()
    path = tmp_path / "sessions" / digest("s")[:2] / digest("s")
    os.mkfifo(path)
    assert take(store) == TakenSession(TakeOutcome.ENDED, ended="lost")
    path.unlink()
    other = tmp_path / "other"
    other.write_bytes(b"kept")
    path.with_name(f"{path.name}.new").symlink_to(other)
    assert isinstance(save(store, b"state"), StoreFailed)
    (path.parent / "folder").mkdir()
    store.sweep()
    assert other.read_bytes() == b"kept"


def test_sweep_removes_old_sessions_and_replicas(tmp_path: Path) -> None:
    store, ended = FolderStore(tmp_path, "first", KEEP_SECONDS), FolderStore(tmp_path, "ended", KEEP_SECONDS)
    store.renew()
    ended.renew()
    for name in ("old", "young", "forgotten"):
        apply(store, SaveSession(name, 1, 5), name.encode())
    apply(store, DropSession("forgotten", 1))
    now = time.time()
    for name, age in (("old", 2 * KEEP_SECONDS), ("forgotten", 2 * FORGOTTEN_SECONDS), ("young", 2 * FORGOTTEN_SECONDS)):
        os.utime(tmp_path / "sessions" / digest(name)[:2] / digest(name), (now - age, now - age))
    for path in (tmp_path / "replicas" / "ended" / "lease", tmp_path / "replicas" / "ended"):
        os.utime(path, (0, 0))
    store.sweep()
    assert [file.read_bytes()[-5:] for file in tmp_path.glob("sessions/*/[0-9a-f]*")] == [b"young"]
    assert [replica.name for replica in (tmp_path / "replicas").iterdir()] == ["first"]


def test_locked_folder_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is stopped while it has a lock does not stop the others."""
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.0)
    store = FolderStore(tmp_path, "first", KEEP_SECONDS)
    with folder._locked(str(tmp_path / "sessions" / digest("s")[:2])):
        results = store.apply([Change(SaveSession("s", 1, 5), b""), Change(SaveSession("t", 1, 5), b"")], may_seize=False)
    assert isinstance(results[0], StoreFailed) and results[1] is True


def test_setting_chooses_the_store(tmp_path: Path) -> None:
    """A folder that cannot be written stops the start."""
    store, began = open_store(Settings(session_store=str(tmp_path)), "first"), time.monotonic()
    assert isinstance(store, FolderStore)
    assert store.read_inbox(0.2) == [] and time.monotonic() - began >= 0.2, "it waits for a note"
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="SEQSERVE_SESSION_STORE"):
        FolderStore(tmp_path / "file", "first", KEEP_SECONDS)


def test_redis_that_does_not_answer_is_an_error() -> None:
    pytest.importorskip("redis")
    store = RedisStore(f"redis://127.0.0.1:{free_ports(1)[0]}/0", "first", KEEP_SECONDS)
    assert isinstance(save(store, b""), StoreFailed)
    for call in (store.renew, lambda: store.read_inbox(0.1), store.end):
        with pytest.raises(StoreFailed):
            call()


def test_redis_that_was_stopped_lets_nobody_seize_a_session(redis: Redis) -> None:
    """All leases have ended then, also the lease of the replica that continues first. It gets its scripts again."""
    first, second = (RedisStore(redis.url, replica, KEEP_SECONDS) for replica in ("owner", "other"))
    redis.stop()
    redis.start()
    first.renew()
    assert apply(first, TakeSession("stopped", 1, 5, begins=True)) == NEW
    assert apply(second, TakeSession("stopped", 2, 9, begins=False)) == HELD
    second.renew()
    first.end()
    assert apply(second, TakeSession("stopped", 2, 9, begins=False)) == TakenSession(TakeOutcome.ENDED, ended="lost")


@pytest.mark.parametrize("url", ["redis://:secret@h:port/0", "redis://user:secret@h/?unknown=1", "redis://:secret@[::1"])
def test_url_that_is_none_stops_the_start_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError, match="SEQSERVE_SESSION_STORE") as failed:
        RedisStore(url, "first", KEEP_SECONDS)
    assert "secret" not in str(failed.value)
