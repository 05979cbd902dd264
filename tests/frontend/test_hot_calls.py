"""The life of a request on the hot path: its replies and its counts, also when something fails. The test plays the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from service.access.caller import LOCAL
from service.errors import InvalidInput, Overloaded, ServiceError
from service.frontend.catalog import ServedModel
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.hot_calls import AnsweredCall, HotEndpoint, HttpReply, Parsed, RequestTally
from service.frontend.inference import ClientDisconnected, track_request
from service.frontend.large_answers import LARGE_ANSWER_BYTES
from service.frontend.origin import NO_ORIGIN, Header, RequestIdentity, RequestOrigin
from service.frontend.request_heads import RequestHead
from service.ipc.channel import encode
from service.ipc.messages import Answer, Api, Cancel, Refusal, Request
from service.metrics import CUT_OFF, GONE, OK, Metrics
from tests import models
from tests.frontend.dispatch.test_dispatcher import EngineProcess, meet, run
from tests.frontend.in_process import frontend_of

HEAD = RequestHead("/infer", 0, {}, LOCAL)


class Echo(HotEndpoint):
    """Replies with the bytes of the answer. The body names the failure."""

    api = Api.INFER

    def accepts(self, head: RequestHead) -> bool:
        return True

    def parse(self, head: RequestHead, body: bytes) -> Parsed | None:
        return None if body == b"unusual" else Parsed("nothing" if body == b"unknown" else "words", None, body)

    def build(self, parsed: Parsed, model: ServedModel, arrived: float) -> tuple[Request, bytes | memoryview]:
        if parsed.context == b"bug in build":
            raise ZeroDivisionError
        return Request("words", "1", [1], deadline=time.monotonic() + 60, sent=time.monotonic()), parsed.context

    def write(self, model: ServedModel, answers: list[AnsweredCall]) -> list[HttpReply | ServiceError]:
        contents = [bytes(answered.data) for answered in answers]
        if b"bug in write" in contents:
            raise ZeroDivisionError
        return [
            HttpReply(data, b"", (lambda content: bytes(content).upper()) if data == b"large" else None) for data in contents
        ]

    async def write_large(self, model: ServedModel, answered: AnsweredCall) -> HttpReply:
        await asyncio.sleep(0)
        name = bytes(answered.data).rstrip(b"\0")
        if name == b"bug":
            raise ZeroDivisionError
        if name == b"wrong":
            raise InvalidInput("wrong")
        return HttpReply(name, b"")


class Exchange:
    """Records the replies."""

    def __init__(self, origin: RequestOrigin = NO_ORIGIN) -> None:
        self.origin, self.request_id = origin, origin.request_id or b"made"
        self.trace_headers: tuple[Header, ...] = ()
        self.replies: list[bytes | memoryview | str] = []
        self.call: Any = None

    def respond(self, content: bytes | memoryview, headers: bytes) -> None:
        self.replies.append(content)

    def respond_error(self, error: ServiceError) -> None:
        self.replies.append(error.code)

    async def reply(self) -> bytes | memoryview | str:
        while not self.replies:
            await asyncio.sleep(0.001)
        assert len(self.replies) == 1
        return self.replies[0]


def start(echo: Echo, *bodies: bytes) -> list[Exchange]:
    """Start a request with each body."""
    exchanges = [Exchange() for _ in bodies]
    for exchange, body in zip(exchanges, bodies, strict=True):
        exchange.call = echo.start(HEAD, body, exchange, time.monotonic())
    return exchanges


Test = Callable[[Echo, EngineProcess, Metrics], Awaitable[None]]


def with_echo(test: Test) -> Callable[[Path], None]:
    """Make a test of a coroutine."""

    def running(tmp_path: Path) -> None:
        spec = models.words(tmp_path)

        async def within(dispatcher: Dispatcher, metrics: Metrics) -> None:
            echo = Echo(frontend_of(dispatcher, metrics, spec), RequestTally(metrics))
            await test(echo, await meet(dispatcher), metrics)

        run(within)

    return running


def outcomes(metrics: Metrics) -> dict[str, float]:
    """Return the number of requests by outcome, after a check that none is in flight."""
    snapshot = metrics.snapshot()
    [(_, [in_flight])] = snapshot["seqserve_requests_in_flight"]
    [(_, [accepted])] = snapshot["seqserve_requests_accepted"]
    counted = {labels[2]: count for labels, [count] in snapshot["seqserve_requests"]}
    assert in_flight == 0
    assert accepted == sum(counted.values())
    return counted


@with_echo
async def test_answers_of_one_tick_reach_their_clients(echo: Echo, engine: EngineProcess, metrics: Metrics) -> None:
    exchanges = start(echo, b"first", b"large", b"third")
    for frame in await engine.frames(3):
        engine.send(encode(Answer(), frame.id, (frame.tail,)))
    assert [await exchange.reply() for exchange in exchanges] == [b"first", b"LARGE", b"third"]
    assert outcomes(metrics) == {"ok": 3}


@with_echo
async def test_refused_requests_are_counted_once(echo: Echo, engine: EngineProcess, metrics: Metrics) -> None:
    assert start(echo, b"unusual")[0].call is None, "the general path counts it"
    for body, error in ((b"unknown", ServiceError), (b"bug in build", ZeroDivisionError)):
        with pytest.raises(error):
            start(echo, body)
    echo.abandon()
    [exchange] = start(echo, b"refused")
    [frame] = await engine.frames(1)
    engine.send(encode(Refusal.of(Overloaded("full")), frame.id))
    assert await exchange.reply() == "overloaded"
    assert outcomes(metrics) == {"unknown_model": 1, "inference_failed": 1, "client_gone": 1, "overloaded": 1}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        *((None, OK), (Overloaded("full"), "overloaded"), (ClientDisconnected(), GONE)),
        *((asyncio.CancelledError(), CUT_OFF), (ZeroDivisionError(), "inference_failed")),
    ],
)
def test_request_of_the_general_path_is_counted_by_its_end(error: BaseException | None, outcome: str) -> None:
    metrics = Metrics()
    frontend = frontend_of(Dispatcher(metrics, 1, lambda: None), metrics)
    identity = RequestIdentity(NO_ORIGIN, frontend.request_ids)
    with (
        pytest.raises(type(error)) if error is not None else nullcontext(),
        track_request(frontend, time.monotonic(), LOCAL, Api.INFER, identity),
    ):
        if error is not None:
            raise error
    assert outcomes(metrics) == {outcome: 1}


@with_echo
async def test_bug_in_writing_answers_every_client(echo: Echo, engine: EngineProcess, metrics: Metrics) -> None:
    exchanges = start(echo, b"bug in write", b"without bugs")
    engine.send(b"".join(encode(Answer(), frame.id, (frame.tail,)) for frame in await engine.frames(2)))
    assert [await exchange.reply() for exchange in exchanges] == ["inference_failed"] * 2
    assert outcomes(metrics) == {"inference_failed": 2}


@with_echo
async def test_large_answer_is_written_by_itself(echo: Echo, engine: EngineProcess, metrics: Metrics) -> None:
    """A small answer of the same tick does not wait for it. It is counted once, however it ends."""
    large = bytes(LARGE_ANSWER_BYTES)
    exchanges = start(echo, *[b"body"] * 5)
    for exchange, answer in zip(
        exchanges, (b"large" + large, b"small", b"bug" + large, b"wrong" + large, b"gone" + large), strict=True
    ):
        exchange.call.answered(Answer(), answer)
    await asyncio.sleep(0)
    assert [exchange.replies for exchange in exchanges] == [[], [b"small"], [], [], []]
    exchanges[4].call.disconnect()
    replies = [await exchange.reply() for exchange in exchanges[:4]]
    assert replies == [b"large", b"small", "inference_failed", "invalid_input"] and exchanges[4].replies == []
    assert outcomes(metrics) == {"ok": 2, "inference_failed": 1, "invalid_input": 1, "client_gone": 1}


@with_echo
async def test_client_that_leaves_is_counted_once_and_gets_nothing(echo: Echo, engine: EngineProcess, metrics: Metrics) -> None:
    """Before the answer, in the tick of the answer, or while its reply is compressed."""
    early, late, compressing = exchanges = start(echo, b"early", b"later", b"large")
    first, second, third = await engine.frames(3)
    early.call.disconnect()
    [cancel] = await engine.frames(1)
    assert (type(cancel.message), cancel.id) == (Cancel, first.id)
    late.call.answered(Answer(), second.tail)
    late.call.disconnect()
    compressing.call.answered(Answer(), third.tail)
    await asyncio.sleep(0)
    compressing.call.disconnect()
    await asyncio.sleep(0.1)
    assert [exchange.replies for exchange in exchanges] == [[], [], []]
    assert outcomes(metrics) == {"client_gone": 2, "ok": 1}
    assert [exchange.call.pending for exchange in exchanges] == [None] * 3, "no cycle waits for the garbage collector"
