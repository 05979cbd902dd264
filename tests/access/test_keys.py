"""The file of keys: its content, the rights of a token, and refused files. tests/long/test_key_timing.py measures the time of a check."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import pytest

from service.access.caller import Caller, Quotas
from service.access.keys import KeyRing, create
from service.access.scopes import Scope
from service.errors import SettingsError
from service.ipc.messages.inference import Share

INFER = [Scope.INFER]
RECORD = f"salt = '{'0' * 32}'\nsha256 = '{'0' * 64}'"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "made" / "keys.toml"


def find(file: Path, token: str) -> Caller:
    caller = KeyRing.read(file).find(token)
    assert caller is not None
    return caller


def test_token_identifies_the_caller_of_its_key_with_its_limits(file: Path) -> None:
    limits = {"max_sessions": 3, "max_requests_per_second": 5, "max_bytes_per_second": 7}
    reader = find(file, create(file, "reader", [Scope.INFER, Scope.SESSION], "sales", max_priority=3, weight=2.5, **limits))
    assert (reader.name, reader.share, reader.max_priority) == ("reader", Share("sales", 2.5), 3)
    assert (reader.max_sessions, reader.quotas) == (3, Quotas(5, 7, 0))
    assert reader.scopes == {Scope.PUBLIC, Scope.INFER, Scope.SESSION, Scope.STATE}
    assert find(file, create(file, "operator", [Scope.ADMIN], "operations")).scopes == {Scope.PUBLIC, Scope.ADMIN}


def test_file_has_no_secret_and_only_its_owner_reads_it(file: Path) -> None:
    tokens = [create(file, f"key-{number}", INFER, "sales") for number in range(20)]
    parts, text = {part for token in tokens for part in token.split(".")}, file.read_text()
    assert len(parts) == 40 and len(set(re.findall(r"salt = '(\w+)'", text))) == 20
    id, _, secret = tokens[0].partition(".")
    assert id in text and secret not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(secret) >= 43, "256 bits in base64"


@pytest.mark.parametrize(
    "form",
    [
        *("", ".", "{id}", "{id}.", "{secret}", ".{secret}", "{id}.{secret}a", "{id}.{secret} ", "{id}.{secret}" + "a" * 99),
        *("{id}.{id}", "{id}{secret}", "0000000000000000.{secret}", "ü{id}.{secret}"),
    ],
)
def test_other_tokens_identify_nobody(form: str, file: Path) -> None:
    id, _, secret = create(file, "reader", INFER, "sales").partition(".")
    ring = KeyRing.read(file)
    assert ring.find(f"{id}.{secret}") is not None
    assert ring.find(form.format(id=id, secret=secret)) is ring.find(f"{id}.{secret[:-1]}") is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[", "keys.toml"),
        ("a = " + "[" * 5000, "keys.toml"),
        ("\xff", "keys.toml"),
        ("a = 1", "keys.toml"),
        ("[a]\nname = 'reader'", "keys.toml: tenant"),
        (f"[a]\nname = 'reader'\ntenant = 'a b'\nscopes = []\n{RECORD}", "tenant"),
        (f"[a]\nname = 'r'\ntenant = 't'\nscopes = ['state']\n{RECORD}", "scopes"),
        (f"[a]\nname = 'r'\ntenant = 't'\nscopes = []\nmax_priority = 11\n{RECORD}", "max_pri"),
        (
            f"[a]\nname = 'r'\ntenant = 't'\nscopes = []\n{RECORD}\n[b]\nname = 'r'\ntenant = 't'\nscopes = []\n{RECORD}",
            "two keys",
        ),
        (None, "keys.toml"),
    ],
)
def test_damaged_file_is_refused_by_name(text: str | None, named: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=named):
        KeyRing.read(file)


@pytest.mark.parametrize("name", ["", "a b", "a\x1fb", "é", "-a", "a" * 65, "a'"])
def test_name_that_could_not_be_stored_is_refused(name: str, file: Path) -> None:
    with pytest.raises(SettingsError, match="name is"):
        create(file, name, INFER, "sales")
    assert not file.exists()


@pytest.mark.parametrize("limit", [{"weight": 0.0}, {"weight": 1e3}, {"max_sessions": -1}, {"max_bytes_per_second": -5}])
def test_limit_that_cannot_be_is_refused(limit: dict[str, Any], file: Path) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(limit))} is"):
        create(file, "reader", INFER, "sales", **limit)
    assert not file.exists()


def test_key_that_was_replaced_is_revoked(file: Path) -> None:
    """The new key has the name of the old key."""
    old = find(file, create(file, "reader", INFER, "sales"))
    file.unlink()
    new = find(file, create(file, "reader", INFER, "sales"))
    ring = KeyRing.read(file)
    assert ring.current(old.key) is None and ring.current(new.key) == new


def test_names_differ_and_a_tenant_has_one_weight(file: Path) -> None:
    create(file, "reader", INFER, "sales", weight=2.0)
    with pytest.raises(SettingsError, match="already has a key named reader"):
        create(file, "reader", INFER, "sales", weight=2.0)
    with pytest.raises(SettingsError, match="the tenant sales have the weights 2 and 1: give all of them one weight"):
        create(file, "writer", INFER, "sales")
    create(file, "other", INFER, "support")
    file.write_text(file.read_text().replace("support", "sales"))
    with pytest.raises(SettingsError, match="the weights 2 and 1"):
        KeyRing.read(file)
