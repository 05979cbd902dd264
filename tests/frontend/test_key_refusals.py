"""Wrong keys are refused on the hot path without a task of the application, and the answers to many of them wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import grpc
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.access import refused_keys
from service.access.keys import create
from service.access.refused_keys import FREE_REFUSALS
from service.access.scopes import Scope
from service.frontend.http_protocol import HttpProtocol
from service.frontend.start_queue import StartQueue
from tests.frontend.conftest import bearer
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.ports import Ports, late_timers, with_ports

LONG_SECONDS, SHORT_SECONDS = 1000.0, 0.01
DENIED = b"HTTP/1.1 401 Unauthorized\r\n"


def guess(*headers: str, path: str = "/infer", body: bytes = b"{}") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: a", "Authorization: Bearer wrong", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


class CalmStarts(StartQueue):
    """No request waits for a later tick, however busy the machine is."""

    def must_wait(self, now: float) -> bool:
        return False


class Guesser:
    """A connection of a client that guesses keys. Its transport is a mock."""

    def __init__(self, ports: Ports) -> None:
        self.state = ports.state
        self.protocol = cast(HttpProtocol, ports.http())
        self.transport = Mock(**{"get_extra_info.return_value": None, "is_closing.return_value": False})
        self.protocol.connection_made(self.transport)

    @property
    def replies(self) -> list[bytes]:
        return [call.args[0] for call in self.transport.write.call_args_list]

    def send(self, data: bytes) -> None:
        self.protocol.data_received(data)


Test = Callable[[Guesser], Awaitable[None]]


@pytest.fixture
def with_guesser(tmp_path: Path) -> Callable[[Test], None]:
    """Return a function that runs a test in an event loop."""
    create(tmp_path / "keys.toml", "valid", [Scope.INFER], "valid")

    def run(test: Test) -> None:
        with_ports(tmp_path, lambda ports: test(Guesser(ports)), CalmStarts, keys=str(tmp_path / "keys.toml"))

    return run


@pytest.mark.parametrize("path", ["/infer", "/v2/models/words/versions/1/infer"])
def test_wrong_key_is_refused_without_a_task(path: str, with_guesser: Callable[[Test], None]) -> None:
    """Also if the request arrives in parts, when it is complete."""

    async def test(guesser: Guesser) -> None:
        head, body = guess(path=path)[:-2], guess()[-2:]
        guesser.send(head)
        assert not guesser.replies
        guesser.send(body)
        assert [reply.startswith(DENIED) for reply in guesser.replies] == [True] and not guesser.state.tasks

    with_guesser(test)


def test_other_requests_belong_to_the_general_path(with_guesser: Callable[[Test], None]) -> None:
    """Behind a proxy, with an unusual head, without such a route, to another endpoint, and with a large body."""

    async def test(guesser: Guesser) -> None:
        unusual = guess("X-Forwarded-For: 10.0.0.1"), guess("TE: trailers"), guess(body=b"x" * ((1 << 16) + 1))
        for data in (*unusual, guess(path="/v2/models/a/b/infer"), guess(path="/tokens")):
            guesser.send(data)
            assert len(guesser.state.tasks) == 1, data
            await asyncio.wait(guesser.state.tasks)

    with_guesser(test)


def test_answers_wait_after_several_wrong_keys(with_guesser: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting answer to a client that leaves has no timer, which would keep the connection in memory."""
    monkeypatch.setattr(refused_keys, "DELAY_SECONDS", SHORT_SECONDS)

    async def test(guesser: Guesser) -> None:
        for _ in range(FREE_REFUSALS):
            guesser.send(guess())
        guesser.send(guess() + guess())
        assert len(guesser.replies) == FREE_REFUSALS and not guesser.state.tasks
        while len(guesser.replies) < FREE_REFUSALS + 2:
            await asyncio.sleep(SHORT_SECONDS)
        monkeypatch.setattr(refused_keys, "DELAY_SECONDS", LONG_SECONDS)
        before = late_timers()
        guesser.send(guess())
        assert late_timers() - before
        guesser.protocol.connection_lost(None)
        await asyncio.sleep(0)
        assert not late_timers() - before and len(guesser.replies) == FREE_REFUSALS + 2

    with_guesser(test)


# Every transport of a frontend.

DELAY_SECONDS = 0.2


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
    """Answers to valid keys of the same address do not. A request without a key guesses nothing."""
    monkeypatch.setattr(refused_keys, "DELAY_SECONDS", DELAY_SECONDS)
    token = create(tmp_path / "keys.toml", "valid", [Scope.INFER, Scope.SESSION], "valid")
    with in_process(models_folder, tmp_path, keys=str(tmp_path / "keys.toml")) as service:
        assert [get(service, "wrong") for _ in range(FREE_REFUSALS)] == [401] * FREE_REFUSALS
        for send, refusal in ((get, 401), (infer, 401), (shake_hands, 401), (call, grpc.StatusCode.UNAUTHENTICATED)):
            began = time.monotonic()
            assert send(service, "wrong") == refusal
            assert time.monotonic() - began >= DELAY_SECONDS
        assert call(service, "wrong", timeout=DELAY_SECONDS / 4) is grpc.StatusCode.DEADLINE_EXCEEDED
        monkeypatch.setattr(refused_keys, "DELAY_SECONDS", LONG_SECONDS)
        assert [get(service, token), get(service, None), infer(service, None), shake_hands(service, token)] == [
            200,
            401,
            401,
            101,
        ]
        assert call(service, token) is grpc.StatusCode.OK
        assert not service.events("bug") and not service.events("library warning")
