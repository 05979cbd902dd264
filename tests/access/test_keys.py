"""The file of keys: its content, the rights of a token, and refused files."""

from __future__ import annotations

import re
import stat
import time
from pathlib import Path

import pytest

from service.access.caller import Quotas
from service.access.keys import KeyRing, create
from service.access.scopes import Scope
from service.errors import SettingsError
from service.ipc.messages import Share

INFER = [Scope.INFER]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "made" / "keys.toml"


def test_token_identifies_the_caller_of_its_key(file: Path) -> None:
    first = create(file, "reader", [Scope.INFER, Scope.SESSION], "sales", max_priority=3)
    second = create(file, "operator", [Scope.ADMIN], "operations")
    ring = KeyRing.read(file)
    reader, operator = ring.find(first), ring.find(second)
    assert reader is not None and operator is not None
    assert (reader.name, reader.share.tenant, reader.max_priority) == ("reader", "sales", 3)
    assert reader.scopes == {Scope.PUBLIC, Scope.INFER, Scope.SESSION, Scope.STATE}
    assert operator.scopes == {Scope.PUBLIC, Scope.ADMIN}


def test_file_has_no_secret_and_only_its_owner_reads_it(file: Path) -> None:
    token = create(file, "reader", INFER, "sales")
    id, _, secret = token.partition(".")
    text = file.read_text()
    assert id in text and secret not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(secret) >= 43, "256 bits in base64"


def test_no_two_tokens_are_alike(file: Path) -> None:
    tokens = [create(file, f"key-{number}", INFER, "sales") for number in range(20)]
    assert len({part for token in tokens for part in token.split(".")}) == 40
    assert len(set(re.findall(r"salt = '(\w+)'", file.read_text()))) == 20


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
    assert ring.find(form.format(id=id, secret=secret)) is None
    assert ring.find(f"{id}.{secret[:-1]}") is None


def test_a_key_without_a_record_is_not_the_empty_secret(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("")
    assert KeyRing.read(file).find("") is None
    assert KeyRing.read(file).find(".") is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[", "keys.toml"),
        ("[a]\nname = 'reader'", "keys.toml: tenant"),
        ("a = 1", "keys.toml"),
        ("[a]\nname = 'reader'\ntenant = 'a b'\nscopes = []\nsalt = ''\nsha256 = ''", "tenant"),
        ("[a]\nname = 'r'\ntenant = 't'\nscopes = ['everything']\nsalt = ''\nsha256 = ''", "scopes"),
        (f"[a]\nname = 'r'\ntenant = 't'\nscopes = ['state']\nsalt = '{'0' * 32}'\nsha256 = '{'0' * 64}'", "scopes"),
        (
            f"[a]\nname = 'r'\ntenant = 't'\nscopes = []\nmax_priority = 11\nsalt = '{'0' * 32}'\nsha256 = '{'0' * 64}'",
            "max_pri",
        ),
        ("\xff", "keys.toml"),
    ],
)
def test_damaged_file_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=named):
        KeyRing.read(file)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.toml"):
        KeyRing.read(tmp_path / "missing.toml")


def test_name_is_given_once(file: Path) -> None:
    create(file, "reader", INFER, "sales")
    with pytest.raises(SettingsError, match="already has a key named reader"):
        create(file, "reader", INFER, "sales")


@pytest.mark.parametrize("name", ["", "a b", "a\x1fb", "é", "-a", "a" * 65, "a'"])
def test_name_that_could_not_be_stored_is_refused(name: str, file: Path) -> None:
    with pytest.raises(SettingsError, match="name is"):
        create(file, name, INFER, "sales")
    assert not file.exists()


def test_limits_are_read_back(file: Path) -> None:
    token = create(
        file, "reader", INFER, "sales", weight=2.5, max_sessions=3, max_requests_per_second=5, max_bytes_per_second=7
    )
    caller = KeyRing.read(file).find(token)
    assert caller is not None
    assert (caller.share, caller.max_sessions, caller.quotas) == (Share("sales", 2.5), 3, Quotas(5, 7, 0))


@pytest.mark.parametrize(
    ("name", "value"), [("weight", 0.0), ("weight", 1e3), ("max_sessions", -1), ("max_bytes_per_second", -5)]
)
def test_limit_that_cannot_be_is_refused(name: str, value: float, file: Path) -> None:
    with pytest.raises(SettingsError, match=f"{name} is"):
        create(file, "reader", INFER, "sales", **{name: value})
    assert not file.exists()


def test_two_keys_of_one_name_are_refused(file: Path) -> None:
    create(file, "reader", INFER, "sales")
    create(file, "writer", INFER, "sales")
    file.write_text(file.read_text().replace("writer", "reader"))
    with pytest.raises(SettingsError, match="two keys are named reader"):
        KeyRing.read(file)


def test_key_that_was_replaced_is_revoked(file: Path) -> None:
    """The new key has the name of the old key."""
    first = create(file, "reader", INFER, "sales")
    old = KeyRing.read(file).find(first)
    file.unlink()
    second = create(file, "reader", INFER, "sales")
    ring = KeyRing.read(file)
    new = ring.find(second)
    assert old is not None and new is not None
    assert ring.current(old.key) is None and ring.current(new.key) == new


def test_tenant_has_one_weight(file: Path) -> None:
    create(file, "reader", INFER, "sales", weight=2.0)
    with pytest.raises(SettingsError, match="the tenant sales have the weights 2 and 1: give all of them one weight"):
        create(file, "writer", INFER, "sales")
    create(file, "other", INFER, "support")
    assert "writer" not in file.read_text()
    file.write_text(file.read_text().replace("support", "sales"))
    with pytest.raises(SettingsError, match="the weights 2 and 1"):
        KeyRing.read(file)


def test_time_of_a_check_does_not_tell_what_is_wrong(file: Path) -> None:
    """Neither an unknown id nor the first wrong character shows in the fastest checks, which other work on the machine does not slow."""
    id, _, secret = create(file, "reader", INFER, "sales").partition(".")
    ring = KeyRing.read(file)
    late, early = secret[:-1] + ("a" if secret[-1] != "a" else "b"), ("a" if secret[0] != "a" else "b") + secret[1:]
    tokens = (f"{id}.{secret}", f"{id}.{late}", f"{id}.{early}", f"{'0' * len(id)}.{secret}")
    times: list[list[int]] = [[] for _ in tokens]
    for _ in range(5000):
        for token, seen in zip(tokens, times, strict=True):
            began = time.perf_counter_ns()
            ring.find(token)
            seen.append(time.perf_counter_ns() - began)
    typical = [sorted(seen)[len(seen) // 10] for seen in times]
    assert max(typical) < 1.25 * min(typical), typical
