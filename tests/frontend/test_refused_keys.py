"""Answers to wrong keys wait on every transport, and valid keys of the same address do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import grpc
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.access import refused_keys
from service.access.keys import create
from service.access.refused_keys import FREE_REFUSALS
from service.access.scopes import Scope
from tests.frontend.conftest import bearer
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.oip.test_grpc import SERVICE

DELAY_SECONDS = 0.3


@pytest.fixture
def guessed(models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[InProcess, str]]:
    """A frontend with a valid key. The client has sent FREE_REFUSALS wrong keys."""
    monkeypatch.setattr(refused_keys, "DELAY_SECONDS", DELAY_SECONDS)
    token = create(tmp_path / "keys.toml", "valid", [Scope.INFER, Scope.SESSION], "valid")
    with in_process(models_folder, tmp_path, keys=str(tmp_path / "keys.toml")) as service:
        assert [get(service, "wrong") for _ in range(FREE_REFUSALS)] == [401] * FREE_REFUSALS
        yield service, token


def get(service: InProcess, token: str | None) -> int:
    return service.client.get("/models", headers=bearer(token)).status_code


def infer(service: InProcess, token: str) -> int:
    return service.client.post("/infer", content=b"{}", headers=bearer(token)).status_code


def shake_hands(service: InProcess, token: str) -> int:
    try:
        url = service.address.replace("http", "ws") + "/stream?model=sensors"
        with connect(url, additional_headers=bearer(token), open_timeout=60, proxy=None):
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


def call(service: InProcess, token: str, timeout: float = 60) -> grpc.StatusCode:
    with grpc.insecure_channel(service.grpc) as channel:
        try:
            channel.unary_unary(f"{SERVICE}/ServerMetadata")(b"", metadata=list(bearer(token).items()), timeout=timeout)
        except grpc.RpcError as error:
            return cast(grpc.StatusCode, error.code())
    return grpc.StatusCode.OK


def test_answers_to_wrong_keys_wait_on_every_transport(guessed: tuple[InProcess, str]) -> None:
    """The answers to wrong keys, which are on their way, arrive after the answers to valid keys that were sent later."""
    service, token = guessed
    sends: tuple[tuple[Callable[[InProcess, str], object], object], ...] = (
        *((get, 401), (infer, 401), (shake_hands, 401), (call, grpc.StatusCode.UNAUTHENTICATED)),
    )
    for send, refusal in sends:
        began = time.monotonic()
        assert send(service, "wrong") == refusal
        assert time.monotonic() - began >= DELAY_SECONDS
    assert call(service, "wrong", timeout=DELAY_SECONDS / 4) is grpc.StatusCode.DEADLINE_EXCEEDED
    service.call(lambda: setattr(refused_keys, "DELAY_SECONDS", 5.0))
    late = [threading.Thread(target=send, args=(service, "wrong")) for send, _ in sends]
    for thread in late:
        thread.start()
    assert get(service, token) == 200 and get(service, None) == 401, "a request without a key guesses nothing"
    assert shake_hands(service, token) == 101 and call(service, token) is grpc.StatusCode.OK
    assert all(thread.is_alive() for thread in late)
    for thread in late:
        thread.join()
    assert not service.events("bug") and not service.events("library warning")
