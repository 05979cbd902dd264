"""GET /access names the caller and its scopes, and a WebSocket takes a key as a subprotocol."""

from __future__ import annotations

from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from service import __version__
from service.access.scopes import Scope
from tests.frontend.conftest import Guarded
from tests.frontend.in_process import InProcess


def test_caller_is_named_with_its_scopes(local: InProcess, guarded: Guarded) -> None:
    assert local.client.get("/access").json() == {
        "caller": "local",
        "needs_key": False,
        "scopes": sorted(Scope),
        "version": __version__,
        "grpc_port": int(local.grpc.rpartition(":")[2]),
    }
    answer = guarded.send("GET", "/access", None).json()
    assert answer["needs_key"] is True and answer["scopes"] == [Scope.PUBLIC]
    for scope, key in guarded.scoped.items():
        answer = guarded.send("GET", "/access", key).json()
        assert answer["caller"] == f"only-{scope}" and not answer["needs_key"]
        assert set(answer["scopes"]) == {Scope.PUBLIC, scope, *([Scope.STATE] if scope is Scope.SESSION else [])}


def test_socket_takes_a_key_as_a_subprotocol(local: InProcess, guarded: Guarded) -> None:
    def opened(service: InProcess | Guarded, *offered: str, **headers: str) -> Any:
        url = service.address.replace("http", "ws") + "/stream?model=sensors"
        return connect(url, subprotocols=list(map(Subprotocol, offered)), additional_headers=headers, proxy=None)

    session, infer = (f"seqserve.key.{guarded.scoped[scope]}" for scope in (Scope.SESSION, Scope.INFER))
    with opened(guarded, "seqserve", session) as socket:
        assert socket.subprotocol == "seqserve", "the key is not repeated"
        socket.send('{"input": [[1, 2, 3]]}')
        assert '"outputs"' in str(socket.recv())
    wrong = {"authorization": "Bearer wrong"}
    for key, headers, status in (("seqserve.key.wrong", {}, 401), (infer, {}, 403), (session, wrong, 401)):
        with pytest.raises(InvalidStatus) as refused:
            opened(guarded, "seqserve", key, **headers)
        assert refused.value.response.status_code == status, "the header decides if there are both"
    for offered, chosen in ((["other", "seqserve"], "seqserve"), (["other"], None)):
        with opened(local, *offered) as socket:
            assert socket.subprotocol == chosen
