"""Answers to wrong keys wait on every transport, and valid keys of the same address do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import grpc
import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.access.keys import create
from service.access.refused_keys import DELAY_SECONDS, FREE_REFUSALS
from service.access.scopes import Scope
from service.frontend.oip.protobuf import SERVICE
from tests.serving import Server, eventually, serving


class Guessed(NamedTuple):
    """A server with a valid key. The client has sent FREE_REFUSALS wrong keys."""

    server: Server
    token: str

    def get(self, token: str | None) -> int:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.get(f"{self.server.address}/models", headers=headers, timeout=60, trust_env=False).status_code

    def infer(self, token: str) -> int:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.post(
            f"{self.server.address}/infer", content=b"{}", headers=headers, timeout=60, trust_env=False
        ).status_code

    def handshake(self, token: str) -> int:
        url = self.server.address.replace("http", "ws") + "/stream?model=sensors"
        try:
            with connect(url, additional_headers={"authorization": f"Bearer {token}"}, open_timeout=60):
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code

    def call(self, token: str, timeout: float = 60) -> grpc.StatusCode:
        metadata = [("authorization", f"Bearer {token}")]
        with grpc.insecure_channel(self.server.grpc) as channel:
            try:
                channel.unary_unary(f"/{SERVICE}/ServerMetadata")(b"", metadata=metadata, timeout=timeout)
            except grpc.RpcError as error:
                return cast(grpc.StatusCode, error.code())
        return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def guessed(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guessed]:
    scratch = tmp_path_factory.mktemp("guessed")
    file = scratch / "keys.toml"
    token = create(file, "valid", [Scope.INFER, Scope.SESSION, Scope.METRICS], "valid")
    with serving(models_folder, scratch, "--keys", str(file)) as server:
        guessed = Guessed(server, token)
        assert [guessed.get("wrong") for _ in range(FREE_REFUSALS)] == [401] * FREE_REFUSALS
        yield guessed


def seconds(send: Callable[[], object]) -> float:
    began = time.monotonic()
    send()
    return time.monotonic() - began


def exhaust(guessed: Guessed) -> None:
    """Send wrong keys until their answers wait: the window may have ended."""
    eventually(lambda: seconds(lambda: guessed.get("wrong")) >= DELAY_SECONDS)


def test_answers_to_wrong_keys_wait_on_every_transport(guessed: Guessed) -> None:
    exhaust(guessed)
    for send, refusal in (
        (guessed.get, 401),
        (guessed.infer, 401),
        (guessed.handshake, 401),
        (guessed.call, grpc.StatusCode.UNAUTHENTICATED),
    ):
        began = time.monotonic()
        assert send("wrong") == refusal
        assert time.monotonic() - began >= DELAY_SECONDS


def test_valid_key_of_the_same_address_does_not_wait(guessed: Guessed) -> None:
    """The answers to wrong keys, which are on their way for DELAY_SECONDS, arrive after the answers to valid keys that were sent later."""
    exhaust(guessed)

    def valid_keys_overtake() -> bool:
        sends = (guessed.get, guessed.infer, guessed.handshake, guessed.call)
        refusals = [threading.Thread(target=send, args=("wrong",)) for send in sends]
        for refusal in refusals:
            refusal.start()
        assert guessed.get(guessed.token) == 200
        assert guessed.handshake(guessed.token) == 101
        assert guessed.call(guessed.token) is grpc.StatusCode.OK
        overtaken = all(refusal.is_alive() for refusal in refusals)
        for refusal in refusals:
            refusal.join()
        return overtaken

    eventually(valid_keys_overtake)


def test_request_without_a_key_does_not_wait(guessed: Guessed) -> None:
    exhaust(guessed)
    assert guessed.get(None) == 401
    eventually(lambda: seconds(lambda: guessed.get(None)) < DELAY_SECONDS)


def test_call_that_ends_before_its_refusal_harms_nothing(guessed: Guessed) -> None:
    exhaust(guessed)
    assert guessed.call("wrong", timeout=DELAY_SECONDS / 4) is grpc.StatusCode.DEADLINE_EXCEEDED
    time.sleep(DELAY_SECONDS)
    assert guessed.call(guessed.token) is grpc.StatusCode.OK
    assert not guessed.server.events("bug") and not guessed.server.events("library warning")
