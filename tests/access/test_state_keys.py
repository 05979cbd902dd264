"""The file of state keys: which secrets sign and verify, how it is created and replaced, and which files are refused."""

from __future__ import annotations

import base64
import os
import re
import stat
from functools import partial
from pathlib import Path

import pytest

from service.access.state_keys import MAX_SECRETS, StateKeys, create
from service.errors import SettingsError
from service.settings import Settings

MESSAGE = [b"a message in ", b"two parts"]
FIRST, SECOND = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "made" / "state-keys"


def keys_of(file: Path) -> StateKeys:
    return StateKeys(Settings(state_keys=str(file)))


def rewrite(file: Path, *lines: str) -> None:
    """Write a file with these lines, with another time of modification than before."""
    file.parent.mkdir(exist_ok=True)
    before = file.stat().st_mtime_ns if file.exists() else 0
    file.write_text("\n".join(lines))
    os.utime(file, ns=(before + 10**9, before + 10**9))


def test_created_secrets_sign_and_only_their_owner_reads_them(file: Path) -> None:
    assert [create(file), create(file)] == [1, 2]
    first, second = re.findall(r"^[\w-]{43}$", file.read_text(), re.MULTILINE)
    assert first != second
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert keys_of(file).verify(MESSAGE, keys_of(file).sign(MESSAGE))


def test_secrets_are_appended_up_to_a_number(file: Path) -> None:
    rewrite(file, FIRST.hex())
    assert [create(file) for _ in range(1, MAX_SECRETS)][-1] == MAX_SECRETS
    assert file.read_text().startswith(f"{FIRST.hex()}\n"), "behind a line without an end"
    with pytest.raises(SettingsError, match="delete a secret"):
        create(file)


def test_hexadecimal_and_base64_secrets_are_the_same(file: Path) -> None:
    signatures = set()
    encoded = (base64.urlsafe_b64encode(FIRST), base64.b64encode(FIRST).rstrip(b"="))
    for line in (FIRST.hex(), FIRST.hex().upper(), *(each.decode() for each in encoded)):
        rewrite(file, "# a comment", "", f" {line} ")
        signatures.add(keys_of(file).sign(MESSAGE))
    assert len(signatures) == 1


def test_rotated_secrets_still_verify_until_they_are_deleted(file: Path) -> None:
    rewrite(file, FIRST.hex())
    keys = keys_of(file)
    old = keys.sign(MESSAGE)
    assert not keys.reload()
    rewrite(file, SECOND.hex(), FIRST.hex())
    assert keys.reload()
    new = keys.sign(MESSAGE)
    assert new != old and keys.verify(MESSAGE, old) and keys.verify(MESSAGE, new)
    rewrite(file, SECOND.hex())
    assert keys.reload()
    assert keys.verify(MESSAGE, new) and not keys.verify(MESSAGE, old)


def test_wrong_file_leaves_the_secrets_as_they_are(file: Path) -> None:
    rewrite(file, FIRST.hex())
    keys = keys_of(file)
    signature = keys.sign(MESSAGE)
    for damage in (partial(rewrite, file, "short"), file.unlink):
        damage()
        with pytest.raises(SettingsError):
            keys.reload()
        assert keys.verify(MESSAGE, signature)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "has 0 secrets"),
        (["# only a comment"], "has 0 secrets"),
        ([FIRST.hex()] * (MAX_SECRETS + 1), "has 9 secrets"),
        (["", FIRST[:31].hex()], "line 2: the secret has 31 bytes"),
        (["00" * 32], "line 1: the secret has 32 bytes, 1 of them distinct"),
        (["what is this?"], "line 1: the secret is neither hexadecimal nor base64url"),
        (["sécret"], "neither hexadecimal nor base64url"),
        (["a" * 41], "neither hexadecimal nor base64url"),
    ],
)
def test_wrong_file_is_refused_by_its_line(lines: list[str], problem: str, file: Path) -> None:
    rewrite(file, *lines)
    with pytest.raises(SettingsError, match=f"^state key file {re.escape(str(file))}.*{problem}") as raised:
        keys_of(file)
    assert not lines or not lines[-1] or lines[-1] not in str(raised.value), "the error repeats no secret"
