"""GET /access names the caller and its scopes, and a WebSocket takes a key as a subprotocol."""

from __future__ import annotations

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from service import __version__
from service.access.scopes import Scope
from tests.frontend.conftest import Guarded
from tests.frontend.in_process import InProcess


def access(address: str, key: str | None = None, **headers: str) -> httpx.Response:
    sent = headers | ({} if key is None else {"authorization": f"Bearer {key}"})
    return httpx.get(f"{address}/access", headers=sent, timeout=60, trust_env=False)


def test_local_client_without_keys_may_do_everything(local: InProcess) -> None:
    assert access(local.address).json() == {
        "caller": "local",
        "needs_key": False,
        "scopes": sorted(Scope),
        "version": __version__,
        "grpc_port": int(local.grpc.rpartition(":")[2]),
    }


def test_key_is_named_with_its_scopes(guarded: Guarded) -> None:
    answer = access(guarded.address)
    assert answer.status_code == 200
    assert answer.json()["needs_key"] is True and answer.json()["scopes"] == [Scope.PUBLIC]
    for scope, key in guarded.scoped.items():
        answer = access(guarded.address, key)
        assert answer.json()["caller"] == f"only-{scope}" and not answer.json()["needs_key"]
        more = {Scope.STATE} if scope is Scope.SESSION else set()
        assert set(answer.json()["scopes"]) == {Scope.PUBLIC, scope, *more}


def test_socket_takes_a_key_as_a_subprotocol(guarded: Guarded) -> None:
    url = guarded.address.replace("http", "ws") + "/stream?model=sensors"

    def offered(key: str) -> list[Subprotocol]:
        return [Subprotocol("seqserve"), Subprotocol(f"seqserve.key.{key}")]

    with connect(url, subprotocols=offered(guarded.scoped[Scope.SESSION]), proxy=None) as socket:
        assert socket.subprotocol == "seqserve", "the key is not repeated"
        socket.send('{"input": [[1, 2, 3]]}')
        assert '"outputs"' in str(socket.recv())
    header = {"authorization": "Bearer wrong"}
    for key, more, status in (
        ("wrong", {}, 401),
        (guarded.scoped[Scope.INFER], {}, 403),
        (guarded.scoped[Scope.SESSION], header, 401),
    ):
        with pytest.raises(InvalidStatus) as refused:
            connect(url, subprotocols=offered(key), additional_headers=more, proxy=None)
        assert refused.value.response.status_code == status, "the header decides if there are both"


def test_socket_without_keys_takes_the_subprotocol_too(local: InProcess) -> None:
    url = local.address.replace("http", "ws") + "/stream?model=sensors"
    for offered, chosen in ((["other", "seqserve"], "seqserve"), (["other"], None)):
        with connect(url, subprotocols=[Subprotocol(name) for name in offered], proxy=None) as socket:
            assert socket.subprotocol == chosen
