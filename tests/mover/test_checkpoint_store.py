"""Stores of checkpoints: the newest state counts, in any order of arrival. Redis needs `make redis`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.servers import free_port
from service.errors import SettingsError
from service.mover.checkpoint_store import Checkpoint, FolderStore, RedisStore, Store, StoreFailed, open_store
from service.settings import Settings
from tests.mover.redis_server import running_redis

KEEP_SECONDS = 60.0


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(params=["folder", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return FolderStore(tmp_path / "checkpoints", KEEP_SECONDS)
    url: str = request.getfixturevalue("redis_url")
    store = RedisStore(url, KEEP_SECONDS)
    for session in ("a", "b"):
        store.drop(session, 1 << 50)
    return store


def test_newest_state_counts(store: Store) -> None:
    for begun, steps in ((5, 10), (5, 30), (5, 20), (4, 99)):
        store.save("a", Checkpoint(begun, steps, f"{begun} {steps}".encode()))
    assert store.find("a") == Checkpoint(5, 30, b"5 30")
    assert store.find("b") is None


def test_later_beginning_counts_more_than_steps(store: Store) -> None:
    store.save("a", Checkpoint(5, 30, b"old"))
    store.save("a", Checkpoint(6, 2, b"new"))
    assert store.find("a") == Checkpoint(6, 2, b"new")


def test_drop_spares_a_session_that_began_later(store: Store) -> None:
    store.save("a", Checkpoint(6, 2, b"new"))
    store.drop("a", 5)
    assert store.find("a") == Checkpoint(6, 2, b"new")
    store.drop("a", 6)
    assert store.find("a") is None


def test_states_have_any_bytes(store: Store) -> None:
    state = bytes(range(256)) * 1000
    store.save("a\x1ftenant / ..", Checkpoint(1, 1, state))
    assert store.find("a\x1ftenant / ..") == Checkpoint(1, 1, state)


def test_torn_file_is_no_state(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, KEEP_SECONDS)
    store.save("a", Checkpoint(1, 1, b"whole"))
    [file] = tmp_path.glob("*/*")
    file.write_bytes(file.read_bytes()[:-1])
    assert store.find("a") is None


def test_folder_keeps_one_file_for_each_session(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, KEEP_SECONDS)
    for steps in range(1, 5):
        store.save("a", Checkpoint(1, steps, b""))
    assert len(list(tmp_path.glob("*/*"))) == 1


def test_sweep_removes_old_files(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, KEEP_SECONDS)
    store.save("a", Checkpoint(1, 1, b""))
    store.save("b", Checkpoint(1, 1, b""))
    for file in tmp_path.glob("*/*"):
        os.utime(file, (0, 0))
        break
    store.sweep()
    assert [store.find(name) is None for name in ("a", "b")].count(True) == 1


def test_folder_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be written"):
        FolderStore(tmp_path / "file", KEEP_SECONDS)


def test_redis_that_does_not_answer_is_an_error() -> None:
    pytest.importorskip("redis")
    store = RedisStore(f"redis://127.0.0.1:{free_port()}/0", KEEP_SECONDS)
    with pytest.raises(StoreFailed):
        store.find("a")
    with pytest.raises(StoreFailed):
        store.drop("a", 1)
    with pytest.raises(StoreFailed):
        store.save("a", Checkpoint(1, 1, b""))


def test_setting_chooses_the_store(tmp_path: Path) -> None:
    assert isinstance(open_store(Settings(checkpoints=str(tmp_path))), FolderStore)
