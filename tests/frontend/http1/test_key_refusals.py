"""Wrong keys are refused on the hot path without a task of the application, and the answers to many of them wait."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import cast

import grpc
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.access import refused_keys
from service.access.caller import ANYBODY
from service.access.keys import create
from service.access.refused_keys import FREE_REFUSALS
from service.access.scopes import Scope
from service.frontend.http1.key_refusals import MAX_BODY_BYTES, KeyRefusals
from service.frontend.http1.request_heads import RequestHead
from service.frontend.run.frontend import Frontend
from tests.frontend.conftest import bearer
from tests.frontend.in_process import InProcess, in_process, late_timers
from tests.frontend.test_hot_path import exchange
from tests.raw_websocket import connection
from tests.serving import eventually

DELAY_SECONDS, LONG_SECONDS = 0.2, 1000.0
GUESS = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\nContent-Length: 2\r\n\r\n{}"


def test_other_requests_belong_to_the_general_path() -> None:
    """Without such a route, to another endpoint, and with a large body."""
    refusals = KeyRefusals(cast(Frontend, None))
    for path, length, accepted in (
        *(("/infer", MAX_BODY_BYTES, True), ("/infer", MAX_BODY_BYTES + 1, False)),
        *(("/v2/models/words/versions/1/infer", 2, True), ("/v2/models/a/b/infer", 2, False), ("/tokens", 2, False)),
    ):
        assert refusals.accepts(RequestHead(path, length, {}, ANYBODY)) is accepted


def get(service: InProcess, token: str | None) -> object:
    return service.client.get("/models", headers=bearer(token)).status_code


def infer(service: InProcess, token: str | None) -> object:
    return service.client.post("/infer", content=b"{}", headers=bearer(token)).status_code


def shake_hands(service: InProcess, token: str | None) -> object:
    url = service.address.replace("http", "ws") + "/stream?model=sensors"
    try:
        with connect(url, additional_headers=bearer(token), open_timeout=60, proxy=None):
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


def call(service: InProcess, token: str | None, timeout: float = 60) -> object:
    with grpc.insecure_channel(service.grpc) as channel:
        method = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
        return method.future(b"", metadata=list(bearer(token).items()), timeout=timeout).code()


def test_answers_to_wrong_keys_wait_on_every_transport(
    models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers to valid keys of the same address do not. A request without a key guesses nothing.

    An answer that waits for a client that leaves has no timer, which would keep the connection in memory.
    """
    monkeypatch.setattr(refused_keys, "DELAY_SECONDS", DELAY_SECONDS)
    token = create(tmp_path / "keys.toml", "valid", [Scope.INFER, Scope.SESSION], "valid")
    with in_process(models_folder, tmp_path, keys=str(tmp_path / "keys.toml"), run=asyncio.run) as service:
        assert [get(service, "wrong") for _ in range(FREE_REFUSALS)] == [401] * FREE_REFUSALS
        for send, refusal in ((get, 401), (infer, 401), (shake_hands, 401), (call, grpc.StatusCode.UNAUTHENTICATED)):
            began = time.monotonic()
            assert send(service, "wrong") == refusal
            assert time.monotonic() - began >= DELAY_SECONDS
        assert exchange(service, GUESS + GUESS, replies=2).count(b"HTTP/1.1 401 ") == 2
        assert call(service, "wrong", timeout=DELAY_SECONDS / 4) is grpc.StatusCode.DEADLINE_EXCEEDED
        monkeypatch.setattr(refused_keys, "DELAY_SECONDS", LONG_SECONDS)
        assert [get(service, token), get(service, None), infer(service, None)] == [200, 401, 401]
        assert (shake_hands(service, token), call(service, token)) == (101, grpc.StatusCode.OK)
        before = late_timers(service)
        with connection(service) as client:
            client.sendall(GUESS)
            eventually(lambda: late_timers(service) - before)
            assert not service._server.server_state.tasks, "the application does not see the request"
        eventually(lambda: not late_timers(service) - before)
        assert not service.events("bug") and not service.events("library warning")
