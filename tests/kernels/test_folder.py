"""Files of compiled kernels: read only as this user has written them, and from no folder of another user."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels import folder as kernels
from kernels.folder import CACHE, KEY, KEY_FOLDER, keep, read_kept


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(tmp_path / "home")))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes()[:-1] + b"!"),
        lambda file: shutil.copy(file.with_name("other"), file),
        lambda file: file.chmod(0o666),
        lambda file: os.truncate(file, 1 << 40),
        as_pipe,
    ],
)
def test_file_counts_only_as_it_was_kept(harm: Callable[[Path], None], folder: Path) -> None:
    for name in ("code/run", "code/other"):
        keep(name, name.encode() * 9)
    assert read_kept("code/run") == b"code/run" * 9
    harm(folder / "code" / "run")
    assert read_kept("code/run") == b""
    keep("code/run", b"again")
    assert read_kept("code/run") == b"again" and len(list((folder / "code").iterdir())) == 2


def test_key_that_others_can_read_is_replaced(folder: Path, home: Path) -> None:
    keep("run", b"code")
    key = home / KEY_FOLDER / KEY
    assert key.stat().st_mode & 0o077 == 0 and not (folder / KEY).exists()
    key.chmod(0o644)
    assert read_kept("run") == b"", "as in a folder that this user has copied from another user"


def test_user_without_a_home_has_the_key_in_the_folder(folder: Path, home: Path) -> None:
    home.rmdir()
    keep("run", b"code")
    assert read_kept("run") == b"code" and (folder / KEY).exists()


def test_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("run", b"code")
    if os.geteuid() == 0:
        os.chown(folder, 1234, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert kernels.cache_folder() is None and read_kept("run") == b""
