"""GET /access names the caller and its scopes, and a WebSocket takes a key as a subprotocol."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from service import __version__
from service.access.keys import create
from service.access.refused_keys import FREE_REFUSALS
from service.access.scopes import KEY_SCOPES, OPEN_SCOPES, Scope
from tests.serving import Server, serving


class Guarded(NamedTuple):
    """A server with keys and an admin port, and a key for each scope."""

    server: Server
    keys: dict[Scope, str]


@pytest.fixture(scope="module")
def guarded(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    scratch = tmp_path_factory.mktemp("access")
    file = scratch / "keys.toml"
    keys = {scope: create(file, f"only-{scope}", [scope], "tenant") for scope in KEY_SCOPES}
    with serving(models_folder, scratch, "--keys", str(file), "--admin-port", "0") as server:
        yield Guarded(server, keys)


def access(address: str, key: str | None = None, **headers: str) -> httpx.Response:
    sent = headers | ({} if key is None else {"authorization": f"Bearer {key}"})
    return httpx.get(f"{address}/access", headers=sent, timeout=60, trust_env=False)


def test_local_client_without_keys_may_do_everything(server: Server) -> None:
    assert access(server.address).json() == {
        "caller": "local",
        "needs_key": False,
        "scopes": sorted(Scope),
        "version": __version__,
        "grpc_port": int(server.grpc.rpartition(":")[2]),
    }


def test_other_hosts_are_named_by_their_rights(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--allowed-hosts", "models.example", "--grpc-port", "off") as server:
        answer = access(server.address, host="models.example").json()
        assert (answer["caller"], answer["scopes"], answer["grpc_port"]) == ("anybody", sorted(OPEN_SCOPES), None)
        assert access(server.address, host="evil.example").status_code == 403
        assert access(server.address, origin="http://evil.example").status_code == 403


def test_service_with_keys_asks_for_one(guarded: Guarded) -> None:
    answer = access(guarded.server.address)
    assert answer.status_code == 200
    assert answer.json()["needs_key"] is True and answer.json()["scopes"] == [Scope.PUBLIC]


@pytest.mark.parametrize("scope", KEY_SCOPES)
def test_key_is_named_with_its_scopes_on_this_port(scope: Scope, guarded: Guarded) -> None:
    main, admin = (access(address, guarded.keys[scope]).json() for address in (guarded.server.address, guarded.server.admin))
    assert main["caller"] == admin["caller"] == f"only-{scope}" and not main["needs_key"]
    on_main = {Scope.INFER: {Scope.INFER}, Scope.SESSION: {Scope.SESSION, Scope.STATE}}.get(scope, set())
    assert set(main["scopes"]) == {Scope.PUBLIC, *on_main}
    assert set(admin["scopes"]) == {Scope.PUBLIC, *({scope} - {Scope.INFER, Scope.SESSION})}


def test_wrong_keys_are_refused_late_and_audited(guarded: Guarded) -> None:
    before = len(guarded.server.events("audit"))
    answers = [access(guarded.server.address, f"wrong-{number}") for number in range(FREE_REFUSALS)]
    assert {answer.status_code for answer in answers} == {401} and answers[0].json()["code"] == "unauthorized"
    assert len(guarded.server.events("audit")) == before + FREE_REFUSALS
    began = time.monotonic()
    assert access(guarded.server.address, "wrong").status_code == 401
    assert time.monotonic() - began >= 0.5


def test_socket_takes_a_key_as_a_subprotocol(guarded: Guarded) -> None:
    url = guarded.server.address.replace("http", "ws") + "/stream?model=sensors"

    def offered(key: str) -> list[Subprotocol]:
        return [Subprotocol("seqserve"), Subprotocol(f"seqserve.key.{key}")]

    with connect(url, subprotocols=offered(guarded.keys[Scope.SESSION])) as socket:
        assert socket.subprotocol == "seqserve", "the key is not repeated"
        socket.send('{"input": [[1, 2, 3]]}')
        assert '"outputs"' in str(socket.recv())
    for key, status in (("wrong", 401), (guarded.keys[Scope.INFER], 403)):
        with pytest.raises(InvalidStatus) as refused, connect(url, subprotocols=offered(key)):
            pass
        assert refused.value.response.status_code == status
    # The header decides if there are both.
    with pytest.raises(InvalidStatus):
        connect(url, subprotocols=offered(guarded.keys[Scope.SESSION]), additional_headers={"authorization": "Bearer wrong"})


def test_socket_without_keys_takes_the_subprotocol_too(server: Server) -> None:
    url = server.address.replace("http", "ws") + "/stream?model=sensors"
    with connect(url, subprotocols=[Subprotocol("other"), Subprotocol("seqserve")]) as socket:
        assert socket.subprotocol == "seqserve"
    with connect(url, subprotocols=[Subprotocol("other")]) as socket:
        assert socket.subprotocol is None
