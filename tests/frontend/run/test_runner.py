"""The life of a request from its body to its end: its replies and its counts, also when something fails. The test plays the engine."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from service.access.caller import LOCAL
from service.errors import InvalidInput, Overloaded, ServiceError
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.http1.request_heads import RequestHead
from service.frontend.run.catalog import ServedModel
from service.frontend.run.exchange import AwaitedExchange, ClientDisconnected, HttpReply
from service.frontend.run.large_answers import LARGE_ANSWER_BYTES
from service.frontend.run.origin import NO_ORIGIN, Header, RequestIdentity, RequestOrigin
from service.frontend.run.runner import DecodedRequest, RequestRunner, RunningRequest
from service.frontend.run.validation import PackedInputs
from service.ipc.blocks import ITEM_BYTES
from service.ipc.channel import Frame, encode
from service.ipc.messages.inference import Answer, Cancel, Request
from service.ipc.messages.message import Refusal
from service.ipc.messages.tracing import Api
from service.metrics import CUT_OFF, GONE, Metrics
from tests import models
from tests.frontend.dispatch.frames import answer_frame
from tests.frontend.dispatch.test_dispatcher import EngineProcess, meet, run
from tests.frontend.in_process import frontend_of

HEAD = RequestHead("/infer", 0, {}, LOCAL)


class Echo(RequestRunner):
    """Replies with the bytes of the answer. The body names the failure."""

    api = Api.INFER

    def accepts(self, head: RequestHead) -> bool:
        return True

    def decode(self, head: RequestHead, body: bytes) -> DecodedRequest | None:
        return None if body == b"unusual" else DecodedRequest("nothing" if body == b"unknown" else "words", None, body)

    def build(
        self, decoded: DecodedRequest, model: ServedModel, arrived: float, packed: PackedInputs | None
    ) -> tuple[Request, bytes | memoryview]:
        if decoded.context == b"bug in build":
            raise ZeroDivisionError
        return Request("words", "1", [1], deadline=time.monotonic() + 60, sent=time.monotonic()), decoded.context

    def write(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        contents = [bytes(call.data).rstrip(b"\0") for call in calls]
        if b"bug in write" in contents:
            raise ZeroDivisionError
        return [
            HttpReply(data, b"", (lambda content: bytes(content).upper()) if data == b"large" else None) for data in contents
        ]

    async def write_large(self, model: ServedModel, call: RunningRequest) -> HttpReply:
        await asyncio.sleep(0)
        name = bytes(call.data).rstrip(b"\0")
        if name == b"bug":
            raise ZeroDivisionError
        if name == b"wrong":
            raise InvalidInput("wrong")
        return HttpReply(name, b"")


def echoed(frame: Frame) -> bytes:
    """Return the frame of an answer with the values of a request."""
    data = bytes(frame.tail) + bytes(-len(frame.tail) % ITEM_BYTES)
    return answer_frame(frame.id, Answer((1, len(data) // ITEM_BYTES), steps=[1]), data)


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
            echo = Echo(frontend_of(dispatcher, metrics, spec))
            await test(echo, await meet(dispatcher), metrics)

        run(within)

    return running


def outcomes(metrics: Metrics) -> Counter[str]:
    """Return the number of requests by outcome, after a check that none is in flight."""
    snapshot = metrics.snapshot()
    [(_, [in_flight])] = snapshot["seqserve_requests_in_flight"]
    [(_, [accepted])] = snapshot["seqserve_requests_accepted"]
    counted = Counter[str]()
    for labels, [count] in snapshot["seqserve_requests"]:
        counted[labels[2]] += int(count)
    assert in_flight == 0
    assert accepted == counted.total()
    return counted


@with_echo
async def test_answers_of_one_tick_reach_their_clients(echo: Echo, engine: EngineProcess, metrics: Metrics) -> None:
    exchanges = start(echo, b"first", b"large", b"third")
    for frame in await engine.frames(3):
        engine.send(echoed(frame))
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


@with_echo
async def test_request_that_a_task_reads_is_counted_by_its_end(echo: Echo, engine: EngineProcess, metrics: Metrics) -> None:
    """While it is read, and while its reply is awaited."""
    exchange = awaited(echo)
    for error in (Overloaded("full"), ClientDisconnected(), asyncio.CancelledError(), ZeroDivisionError()):
        with pytest.raises(type(error)), echo.reading(exchange, time.monotonic(), LOCAL):
            raise error
    assert outcomes(metrics) == {"overloaded": 1, GONE: 1, CUT_OFF: 1, "inference_failed": 1}
    body = DecodedRequest("words", None, b"body")
    waiting = [asyncio.ensure_future(echo.answer(body, awaited(echo), time.monotonic(), LOCAL)) for _ in range(3)]
    first, second, _ = await engine.frames(3)
    engine.send(echoed(first) + encode(Refusal.of(Overloaded("full")), second.id))
    assert (await waiting[0]).content == b"body"
    with pytest.raises(Overloaded):
        await waiting[1]
    waiting[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[2]
    assert outcomes(metrics) == {"ok": 1, "overloaded": 2, GONE: 1, CUT_OFF: 2, "inference_failed": 1}


class Body:
    """A body that tells whether something refers to it."""


@with_echo
async def test_nothing_refers_to_a_request_that_ends_while_it_is_packed(
    echo: Echo, engine: EngineProcess, metrics: Metrics
) -> None:
    """With an error, or cancelled: large bodies would stay in memory until a garbage collection."""

    async def refuse(model: ServedModel) -> PackedInputs:
        await asyncio.sleep(0)
        raise InvalidInput("wrong")

    async def wait(model: ServedModel) -> PackedInputs:
        await asyncio.Event().wait()
        raise AssertionError

    gc.disable()
    try:
        for pack in (refuse, wait):
            body = Body()
            kept, decoded = weakref.ref(body), DecodedRequest("words", None, body, pack=pack)
            answering = asyncio.ensure_future(echo.answer(decoded, awaited(echo), time.monotonic(), LOCAL))
            del body, decoded
            await asyncio.wait([answering], timeout=0.1)
            answering.cancel()
            await asyncio.wait([answering])
            del answering
            await asyncio.sleep(0)
            assert kept() is None
    finally:
        gc.enable()
    assert outcomes(metrics) == {"invalid_input": 1, CUT_OFF: 1}


def awaited(echo: Echo) -> AwaitedExchange:
    return AwaitedExchange(RequestIdentity(NO_ORIGIN, echo.frontend.request_ids))


@with_echo
async def test_bug_in_writing_answers_every_client(echo: Echo, engine: EngineProcess, metrics: Metrics) -> None:
    exchanges = start(echo, b"bug in write", b"without bugs")
    engine.send(b"".join(echoed(frame) for frame in await engine.frames(2)))
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
