"""Requests for inference without a valid key are refused on the hot path, without a task of the application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from service.access import refused_keys
from service.access.keys import create
from service.access.refused_keys import FREE_REFUSALS
from service.access.scopes import Scope
from service.frontend.app import build_app
from service.frontend.catalog import Catalog
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.http_protocol import HttpProtocol
from service.frontend.inference import Frontend, SupervisorClient
from service.frontend.server import build_hot_path
from service.frontend.start_queue import StartQueue
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from tests.frontend.dispatch.test_dispatcher import run

LONG_SECONDS, SHORT_SECONDS = 1000.0, 0.01
DENIED = b"HTTP/1.1 401 Unauthorized\r\n"


def guess(*headers: str, path: str = "/infer", body: bytes = b"{}") -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: a",
        "Authorization: Bearer wrong",
        *headers,
        f"Content-Length: {len(body)}",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


class CalmStarts(StartQueue):
    """No request waits for a later tick, however busy the machine is."""

    def must_wait(self, now: float) -> bool:
        return False


class Guesser:
    """A connection of a client that guesses keys. Its transport is a mock."""

    def __init__(self, frontend: Frontend) -> None:
        config = uvicorn.Config(build_app(frontend), http=HttpProtocol, log_config=None, lifespan="off")
        config.load()
        self.state = ServerState()
        self.protocol = HttpProtocol(config, self.state, {}, hot_path=build_hot_path(frontend))
        self.transport = Mock(**{"get_extra_info.return_value": None, "is_closing.return_value": False})
        self.protocol.connection_made(self.transport)

    @property
    def replies(self) -> list[bytes]:
        return [call.args[0] for call in self.transport.write.call_args_list]

    def send(self, data: bytes) -> None:
        self.protocol.data_received(data)

    def exhaust(self) -> None:
        """Send the wrong keys that are answered at once."""
        for _ in range(FREE_REFUSALS):
            self.send(guess())
        assert len(self.replies) == FREE_REFUSALS
        self.transport.write.reset_mock()


def with_guesser(root: Path, seconds: float, test: Callable[[Guesser, Metrics], Awaitable[None]]) -> None:
    """Run a test in an event loop. seconds: how long an answer waits."""
    file = root / "keys.toml"
    create(file, "valid", [Scope.INFER], "valid")
    settings = Settings(keys=str(file))

    async def run_test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        catalog, supervisor = Catalog([], {}), cast(SupervisorClient, None)
        frontend = Frontend(settings, catalog, dispatcher, metrics, Log("frontend"), supervisor)
        frontend.starts = CalmStarts(settings.default_deadline_ms)
        await test(Guesser(frontend), metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refused_keys, "DELAY_SECONDS", seconds)
        run(run_test)


def accepted(metrics: Metrics) -> float:
    """Return how many requests for inference are counted."""
    metrics.snapshot()
    return sum(count for [count] in metrics.accepted.values.values())


@pytest.mark.parametrize("path", ["/infer", "/v2/models/words/infer", "/v2/models/words/versions/1/infer"])
def test_wrong_key_is_refused_without_a_task(path: str, tmp_path: Path) -> None:
    async def test(guesser: Guesser, metrics: Metrics) -> None:
        guesser.send(guess(path=path))
        assert [reply.startswith(DENIED) for reply in guesser.replies] == [True]
        assert not guesser.state.tasks
        assert metrics.denied.values == {("unauthorized",): [1.0]}
        assert accepted(metrics) == 0

    with_guesser(tmp_path, LONG_SECONDS, test)


@pytest.mark.parametrize(
    "data",
    [
        guess("X-Forwarded-For: 10.0.0.1"),
        guess("TE: trailers"),
        guess(path="/v2/models/a/b/infer"),
        guess(path="/tokens"),
        guess(body=b"x" * ((1 << 16) + 1)),
    ],
    ids=["client of a proxy", "unusual head", "no route", "another endpoint", "large body"],
)
def test_other_requests_belong_to_the_general_path(data: bytes, tmp_path: Path) -> None:
    async def test(guesser: Guesser, _: Metrics) -> None:
        guesser.send(data)
        assert len(guesser.state.tasks) == 1
        await asyncio.wait(guesser.state.tasks)

    with_guesser(tmp_path, LONG_SECONDS, test)


def test_answer_waits_after_several_wrong_keys(tmp_path: Path) -> None:
    async def test(guesser: Guesser, _: Metrics) -> None:
        guesser.exhaust()
        guesser.send(guess() + guess())
        assert not guesser.replies and not guesser.state.tasks
        while len(guesser.replies) < 2:
            await asyncio.sleep(SHORT_SECONDS)
        assert all(reply.startswith(DENIED) for reply in guesser.replies)

    with_guesser(tmp_path, SHORT_SECONDS, test)


def test_request_without_a_key_does_not_wait(tmp_path: Path) -> None:
    async def test(guesser: Guesser, _: Metrics) -> None:
        guesser.exhaust()
        guesser.send(guess().replace(b"Authorization: Bearer wrong\r\n", b""))
        assert len(guesser.replies) == 1 and b"the request has no key" in guesser.replies[0]

    with_guesser(tmp_path, LONG_SECONDS, test)


def test_request_that_arrives_in_parts_is_refused_when_it_is_complete(tmp_path: Path) -> None:
    async def test(guesser: Guesser, metrics: Metrics) -> None:
        head, body = guess()[:-2], guess()[-2:]
        guesser.send(head)
        assert not guesser.replies
        guesser.send(body)
        assert len(guesser.replies) == 1 and not guesser.state.tasks
        guesser.send(head)
        guesser.protocol.connection_lost(None)
        assert accepted(metrics) == 0

    with_guesser(tmp_path, LONG_SECONDS, test)


def test_client_that_leaves_is_forgotten_at_once(tmp_path: Path) -> None:
    """The answer that waits for it leaves no timer, which would keep the connection in memory."""

    def timers() -> set[asyncio.TimerHandle]:
        loop: Any = asyncio.get_running_loop()
        return {timer for timer in loop._scheduled if not timer.cancelled()}

    async def test(guesser: Guesser, _: Metrics) -> None:
        guesser.exhaust()
        before = timers()
        guesser.send(guess())
        assert timers() - before
        guesser.protocol.connection_lost(None)
        await asyncio.sleep(0)
        assert not timers() - before and not guesser.replies

    with_guesser(tmp_path, LONG_SECONDS, test)
