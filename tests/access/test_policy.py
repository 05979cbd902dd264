"""Which requests are admitted: by key, by Host and by Origin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from service.access.caller import ANYBODY, LOCAL, Caller
from service.access.keys import create
from service.access.policy import AccessPolicy, check_start
from service.access.scopes import Scope
from service.errors import Forbidden, SettingsError, Unauthorized
from service.ipc.messages.inference import Request, Share
from service.ipc.messages.sessions import session_id
from service.settings import Settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def admit(settings: Settings | AccessPolicy, scope: Scope = Scope.INFER, **headers: Any) -> Caller:
    policy = AccessPolicy(settings) if isinstance(settings, Settings) else settings
    caller = policy.identify(**{"host": "localhost:8000", "origin": None, "authorization": None, **headers})
    caller.require(scope)
    return caller


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"])
def test_without_keys_a_local_client_may_do_everything(host: str) -> None:
    assert {admit(Settings(), scope, host=host) for scope in Scope} == {LOCAL}


@pytest.mark.parametrize(
    ("headers", "setting"),
    [
        *(({"host": host}, "HOSTS") for host in ("", "example.com", "127.0.0.1.example.com", "localhost.example.com:8000")),
        *(({"host": host}, "HOSTS") for host in ("127.0.0.2", "[::2]")),
        *(({"origin": origin}, "ORIGINS") for origin in ("null", "http://[", "http://example.com", "https://localhost:9")),
        ({"origin": "http://localhost:8000.example.com"}, "ORIGINS"),
    ],
)
def test_other_hosts_and_pages_of_other_origins_are_refused(headers: dict[str, Any], setting: str) -> None:
    for settings in (Settings(), Settings(insecure=True)):
        with pytest.raises(Forbidden, match=f"SEQSERVE_ALLOWED_{setting}"):
            admit(settings, **headers)


def test_client_of_an_allowed_host_may_infer_and_not_administrate() -> None:
    policy = AccessPolicy(Settings(allowed_hosts="Model.example, other.example"))
    assert admit(policy, host="model.example:80") is ANYBODY
    assert admit(Settings(insecure=True, host="0.0.0.0", allowed_hosts="*"), Scope.ADMIN, host="example.com") is LOCAL
    for scope in (Scope.ADMIN, Scope.DEBUG, Scope.STATE):
        with pytest.raises(Forbidden, match=f"{scope} is for local clients"):
            admit(policy, scope, host="model.example")


def test_own_pages_and_allowed_origins_are_admitted() -> None:
    for origin in ("http://localhost:8000", "https://app.example"):
        assert admit(Settings(allowed_origins="https://App.example"), origin=origin) is LOCAL


def test_with_keys_every_caller_needs_one(file: Path) -> None:
    token = create(file, "reader", [Scope.INFER, Scope.SESSION], "sales", max_priority=2)
    policy = AccessPolicy(Settings(keys=str(file), host="0.0.0.0"))
    caller = admit(policy, host="any.example", authorization=f"Bearer {token}")
    assert (caller.name, caller.share.tenant) == ("reader", "sales")
    assert admit(policy, Scope.STATE, authorization=f"bearer  {token}").name == "reader"
    with pytest.raises(Forbidden, match="reader does not have the scope admin"):
        admit(policy, Scope.ADMIN, authorization=f"Bearer {token}")
    for wrong in (None, "", token, f"Basic {token}", "Bearer ", f"Bearer {token}x", f"Bearer{token}"):
        with pytest.raises(Unauthorized, match="Authorization: Bearer"):
            admit(policy, authorization=wrong)


def test_changed_file_is_read_and_a_damaged_one_is_not(file: Path) -> None:
    first = create(file, "first", [Scope.INFER], "sales")
    policy = AccessPolicy(Settings(keys=str(file)))
    policy.reload()
    assert policy.generation == 0
    second = create(file, "second", [Scope.INFER], "sales")
    policy.reload()
    assert policy.generation == 1
    assert admit(policy, authorization=f"Bearer {second}").name == "second"
    file.write_text("[")
    with pytest.raises(SettingsError):
        policy.reload()
    policy.reload()
    assert policy.generation == 1
    assert admit(policy, authorization=f"Bearer {first}").name == "first"
    file.write_text("")
    os.utime(file, (0, 0))  # a revoked key must not outlive its table because an older file replaces the newer one
    policy.reload()
    with pytest.raises(Unauthorized):
        admit(policy, authorization=f"Bearer {first}")


def test_service_that_others_reach_needs_keys_or_consent(file: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.com", ""):
        with pytest.raises(SettingsError, match="set keys to a file"):
            check_start(Settings(host=host))
        check_start(Settings(host=host, insecure=True))
    for host in ("127.0.0.1", "127.3.4.5", "::1", "localhost", "::ffff:127.0.0.1"):
        check_start(Settings(host=host))
    create(file, "reader", [Scope.INFER], "sales")
    check_start(Settings(host="0.0.0.0", keys=str(file)))
    with pytest.raises(SettingsError, match="missing"):
        check_start(Settings(keys=str(file.with_name("missing.toml"))))


def request(**options: Any) -> Request:
    return Request("words", "1", [1], deadline=1.0, sent=0.0, **options)


def test_sessions_of_two_tenants_have_different_names() -> None:
    one, other = (Caller("key", Share(tenant), frozenset(Scope), 0) for tenant in ("one", "other"))
    names = {one.session("7"), other.session("7"), LOCAL.session("7")}
    assert len(names) == 3 and {session_id(name) for name in names} == {"7"}
    assert one.admit(request(session="7")).session == one.session("7")
    assert LOCAL.admit(request(session="7")).session == "7"
    assert one.admit(request()).session is None


def test_priority_and_sessions_need_the_right() -> None:
    caller = Caller("reader", Share("sales"), frozenset((Scope.INFER,)), 1)
    assert [caller.admit(request(priority=priority)).priority for priority in (1, -5)] == [1, -5]
    with pytest.raises(Forbidden, match="highest priority of reader is 1") as refused:
        caller.admit(request(priority=2))
    assert refused.value.field == "priority"
    with pytest.raises(Forbidden, match="scope session"):
        caller.admit(request(session="7"))
