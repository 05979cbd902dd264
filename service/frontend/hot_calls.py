"""The common part of the endpoints of the hot path: a request from its body to its reply, in callbacks, with its metrics.

The answers that arrive in one tick of the event loop are written together, which makes each of them cheaper.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from random import random
from typing import Any, ClassVar

from msgspec import Struct, structs

from service.access.caller import Caller
from service.errors import InferenceFailed, ServiceError
from service.frontend.catalog import ServedModel
from service.frontend.dispatch.connection import PendingRequest
from service.frontend.http_protocol import Exchange
from service.frontend.inference import (
    UNKNOWN_MODEL_LABELS,
    Frontend,
    TrackedRequest,
    count_end,
    may_be_of_another_version,
    run_inference,
)
from service.frontend.large_answers import LARGE_ANSWER_BYTES
from service.frontend.observation import EndedRequest, Observation
from service.frontend.request_heads import RequestHead
from service.ipc.messages import Answer, Api, ModelKey, Request
from service.metrics import CUT_OFF, GONE, OK, Metrics


class RequestTally:
    """Counts requests as `track_request` does, for the hot path: in plain lists, which are folded into the metrics when these are read."""

    MAX_UNFOLDED = 2048
    """Requests after which the lists are folded in any case."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.accepted = 0
        """Requests that were sent to an engine, or refused. An attribute, because every request counts itself."""
        self._ended = self._unfolded = 0
        self._seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
        self._last_answer: dict[tuple[str, str], float] = {}
        metrics.before_snapshot(self._fold)

    def answer(
        self, labels: tuple[str, str], parse: Sequence[float], total: Sequence[float], *, reply: float, encode: float
    ) -> None:
        """Count requests of one model that were answered together.

        parse, total: seconds of each. reply: their mean. encode: seconds until all were encoded, which each of them waited.
        """
        seconds = self._seconds.get(labels)
        if seconds is None:
            seconds = self._seconds[labels] = {"parse": [], "total": []}
        seconds["parse"] += parse
        seconds["total"] += total
        self._metrics.stage_seconds.observe_often(reply, len(total), *labels, "reply")
        self._metrics.stage_seconds.observe_often(encode, len(total), *labels, "encode")
        self._last_answer[labels] = datetime.now(UTC).timestamp()
        self._ended += len(total)
        self._unfolded += len(total)
        if self._unfolded > self.MAX_UNFOLDED:
            self._fold()

    def fail(self, labels: tuple[str, str], outcome: str, seconds: float) -> None:
        """Count a request that ended without an answer."""
        self._ended += 1
        count_end(self._metrics, labels, outcome, seconds)

    def _fold(self) -> None:
        metrics = self._metrics
        metrics.accepted.add(by=self.accepted)
        metrics.in_flight.add(by=self.accepted - self._ended)
        self.accepted = self._ended = self._unfolded = 0
        for labels, stages in self._seconds.items():
            metrics.requests.add(*labels, OK, by=len(stages["total"]))
            for stage, seconds in stages.items():
                metrics.stage_seconds.observe_all(seconds, *labels, stage)
            metrics.last_answer.set(self._last_answer[labels], *labels)
        self._seconds, self._last_answer = {}, {}


class Parsed(Struct, frozen=True):
    """A request whose body is decoded. version: None for the newest. context: data from which the endpoint writes the reply.

    session: the id of the session that the request belongs to, if there is one.
    """

    model: str
    version: str | int | None
    context: Any
    session: str | None = None


class AnsweredCall(Struct, frozen=True):
    """A call with the engine's answer to it."""

    call: HotCall
    answer: Answer
    data: bytes | memoryview


class HttpReply(Struct, frozen=True):
    """A successful reply. headers: complete lines. compress: compresses the content in a thread if it is worth it."""

    content: bytes | memoryview
    headers: bytes
    compress: Callable[[bytes | memoryview], bytes] | None = None


class HotCall(Struct, eq=False):
    """One request, from its start to its reply. arrived, sent: monotonic times in seconds. lengths: the steps of its sequences."""

    endpoint: HotEndpoint
    exchange: Exchange
    model: ServedModel
    arrived: float
    sent: float
    parsed: Parsed
    caller: Caller
    observation: Observation | None
    lengths: Sequence[int] = ()
    pending: PendingRequest | None = None
    search: asyncio.Task[None] | None = None
    """Sends the request to the version that its session belongs to."""
    disconnected: bool = False
    counted: bool = False
    """Whether its end is in the metrics."""

    def answered(self, answer: Answer, data: bytes | memoryview) -> None:
        self.pending = None  # it refers to this call: a cycle would stay in memory until the next full garbage collection
        self.endpoint.collect(AnsweredCall(self, answer, data))

    def failed(self, error: ServiceError) -> None:
        self.pending = None
        self.endpoint.fail_or_search(self, error)

    def disconnect(self) -> None:
        self.endpoint.cancel(self, GONE)

    def cut_off(self) -> None:
        """The service shuts down: cancel the request. The exchange is not used any more."""
        self.endpoint.cancel(self, CUT_OFF)


class HotEndpoint(ABC):
    """Runs the requests of one endpoint, which belongs to `api`."""

    api: ClassVar[Api]

    def __init__(self, frontend: Frontend, tally: RequestTally) -> None:
        self.frontend = frontend
        self._tally = tally
        self._observer = frontend.observer
        self._answered: dict[ModelKey, list[AnsweredCall]] = {}
        self._writing: set[asyncio.Task[None]] = set()

    @abstractmethod
    def accepts(self, head: RequestHead) -> bool:
        """See `Endpoint.accepts`."""

    @abstractmethod
    def parse(self, head: RequestHead, body: bytes) -> Parsed | None:
        """Return the decoded request, or None for a request that only the general path can answer or explain."""

    @abstractmethod
    def build(self, parsed: Parsed, model: ServedModel, arrived: float) -> tuple[Request, bytes | memoryview]:
        """Validate the inputs, and return the engine's request and its tensor bytes; raises a ServiceError."""

    @abstractmethod
    def write(self, model: ServedModel, answers: list[AnsweredCall]) -> list[HttpReply | ServiceError]:
        """Return the reply to each answer of one model."""

    @abstractmethod
    async def write_large(self, model: ServedModel, answered: AnsweredCall) -> HttpReply:
        """Return the reply to an answer that would stall the event loop if it was written at once; raises a ServiceError."""

    def start(self, head: RequestHead, body: bytes, exchange: Exchange, arrived: float) -> HotCall | None:
        """See `Endpoint.start`."""
        if self.frontend.starts.refusing:
            error = self.frontend.starts.refuse()
            self.refuse(UNKNOWN_MODEL_LABELS, error, arrived, exchange, head.caller)
            raise error
        parsed = self.parse(head, body)
        return None if parsed is None else self.run(parsed, exchange, arrived, head.caller)

    def run(
        self,
        parsed: Parsed,
        exchange: Exchange,
        arrived: float,
        caller: Caller,
        model: ServedModel | None = None,
    ) -> HotCall:
        """Send a decoded request to an engine. The reply comes after the return. Raises the ServiceError of a request that is refused.

        model: the model of the session, instead of the model that the request names.
        """
        self._tally.accepted += 1
        catalog, retired = self.frontend.catalog, None
        observer, observation = self._observer, None
        # Most requests are not chosen: that should cost nothing but the random number.
        if observer.chooses and ((drawn := random()) < observer.highest_rate or exchange.origin.traceparent):
            observation = observer.begin(exchange, drawn)
        try:
            if model is None and parsed.session is None:
                model = catalog.find(parsed.model, parsed.version)
            elif model is None:  # only an open session may still use a model that is not served any more
                model, retired = catalog.find_or_retired(parsed.model, parsed.version)
            call = HotCall(self, exchange, model, arrived, arrived, parsed, caller, observation)
            if retired is None:
                self._send(call)
            else:
                self._search_version(call)
        except Exception as error:
            code = InferenceFailed.code
            if isinstance(error, ServiceError):
                code = error.code
                self.frontend.retries.charge(error)
            labels = UNKNOWN_MODEL_LABELS if model is None else model.key.labels
            self._end_refused(exchange, labels, code, arrived, caller, observation)
            raise
        return call

    def refuse(
        self,
        labels: tuple[str, str],
        error: ServiceError,
        arrived: float,
        exchange: Exchange,
        caller: Caller,
    ) -> None:
        """Count a request that cannot be decoded."""
        self._tally.accepted += 1
        self.frontend.retries.charge(error)
        observation = self._observer.begin(exchange, random()) if self._observer.chooses else None
        self._end_refused(exchange, labels, error.code, arrived, caller, observation)

    def _end_refused(
        self,
        exchange: Exchange,
        labels: tuple[str, str],
        outcome: str,
        arrived: float,
        caller: Caller,
        observation: Observation | None,
    ) -> None:
        """Count and report a request that is not sent to an engine."""
        ended = time.monotonic()
        self._tally.fail(labels, outcome, ended - arrived)
        request = EndedRequest(self.api, exchange, caller.name, labels, outcome, arrived, ended=ended)
        self._observer.end(observation, request)

    def abandon(self, outcome: str = GONE) -> None:
        """See `Endpoint.abandon`. outcome: its label in the metrics."""
        self._tally.accepted += 1
        self._tally.fail(UNKNOWN_MODEL_LABELS, outcome, 0.0)

    def collect(self, answered: AnsweredCall) -> None:
        """Keep an answer until the end of the tick."""
        if not self._answered:
            asyncio.get_running_loop().call_soon(self._write_answers)
        self._answered.setdefault(answered.call.model.key, []).append(answered)

    def fail(self, call: HotCall, error: ServiceError) -> None:
        """Reply with the error that a request ended with."""
        self._count_failure(call, error.code)
        self.frontend.retries.charge(error)
        call.exchange.respond_error(error)

    def fail_or_search(self, call: HotCall, error: ServiceError) -> None:
        """Reply with the error, unless the request may succeed with the version that its session belongs to."""
        if may_be_of_another_version(self.frontend, call.model, call.parsed.session, error):
            self._search_version(call)
        else:
            self.fail(call, error)

    def cancel(self, call: HotCall, outcome: str) -> None:
        """Cancel a request that nothing waits for any longer. outcome: its label in the metrics."""
        call.disconnected = True
        if call.pending is not None:
            self.frontend.dispatcher.cancel(call.pending)
            call.pending = None
        if call.search is not None:
            call.search.cancel()
        if not call.counted:
            self._count_failure(call, outcome)

    def _send(self, call: HotCall) -> None:
        try:
            request, data = self.build(call.parsed, call.model, call.arrived)
        except ServiceError as error:
            if not may_be_of_another_version(self.frontend, call.model, call.parsed.session, error):
                raise
            self._search_version(call)
            return
        request = call.caller.admit(request)
        if call.observation is not None or self._observer.times_all:
            request = structs.replace(request, timed=True)
        call.lengths = request.lengths
        call.sent = request.sent
        call.pending = self.frontend.send(call.caller, request, data, call)

    def _search_version(self, call: HotCall) -> None:
        """Start again as the general path does, which finds the version of the session."""
        call.search = asyncio.ensure_future(self._run_inference(call))

    async def _run_inference(self, call: HotCall) -> None:
        tracked, parsed = TrackedRequest(call.arrived, call.caller, observation=call.observation), call.parsed

        async def build(model: ServedModel) -> tuple[Request, bytes | memoryview]:
            call.model = model
            return self.build(parsed, model, call.arrived)

        try:
            _, answered = await run_inference(self.frontend, tracked, parsed.model, parsed.version, parsed.session, build)
        except ServiceError as error:
            self.fail(call, error)
        except Exception as error:
            self.fail(call, self.frontend.internal_error(error))
        else:
            call.answered(*answered)
        finally:
            call.lengths = tracked.lengths
            call.search = None

    def _count_failure(self, call: HotCall, outcome: str) -> None:
        call.counted = True
        now = time.monotonic()
        self._tally.fail(call.model.key.labels, outcome, now - call.arrived)
        self._report(call, outcome, now)

    def _report(self, call: HotCall, outcome: str, ended: float, received: float = 0.0, answer: Answer | None = None) -> None:
        """Log and trace a request that has ended, if it should be. received: when its reply began to be written."""
        request = EndedRequest(
            self.api,
            call.exchange,
            call.caller.name,
            call.model.key.labels,
            outcome,
            call.arrived,
            call.sent,
            received,
            ended,
            call.lengths,
            answer,
        )
        self._observer.end(call.observation, request)

    def _write_answers(self) -> None:
        by_model, self._answered = self._answered, {}
        for answers in by_model.values():
            waiting = [answered for answered in answers if not answered.call.disconnected]
            small = [answered for answered in waiting if len(answered.data) <= LARGE_ANSWER_BYTES]
            if small:
                self._write_answers_of_model(small[0].call.model, small)
            if len(small) < len(waiting):
                self._start_writing([answered for answered in waiting if len(answered.data) > LARGE_ANSWER_BYTES])

    def _start_writing(self, answers: list[AnsweredCall]) -> None:
        for answered in answers:
            task = asyncio.ensure_future(self._write_large_answer(answered))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write_large_answer(self, answered: AnsweredCall) -> None:
        start, call = time.monotonic(), answered.call
        try:
            reply: HttpReply | ServiceError = await self.write_large(call.model, answered)
        except ServiceError as error:
            reply = error
        except Exception as error:
            reply = self.frontend.internal_error(error)
        if not call.disconnected:
            self._send_replies(call.model, [answered], [reply], start)

    def _write_answers_of_model(self, model: ServedModel, answers: list[AnsweredCall]) -> None:
        start = time.monotonic()
        try:
            replies = self.write(model, answers)
        except Exception as error:
            replies = [self.frontend.internal_error(error)] * len(answers)
        self._send_replies(model, answers, replies, start)

    def _send_replies(
        self, model: ServedModel, answers: list[AnsweredCall], replies: Sequence[HttpReply | ServiceError], start: float
    ) -> None:
        """Send the replies to requests of one model, and count these. start: when the writing of the replies began."""
        replied, ready = [], 0.0
        for answered, reply in zip(answers, replies, strict=True):
            call = answered.call
            if isinstance(reply, ServiceError):
                self.fail(call, reply)
                continue
            call.counted = True
            replied.append(call)
            ready += answered.answer.ready
            if reply.compress is None:
                call.exchange.respond(reply.content, reply.headers)
            else:
                _compress_and_respond(call, reply, reply.compress)
        if replied:
            now = time.monotonic()
            parse, total = [call.sent - call.arrived for call in replied], [now - call.arrived for call in replied]
            waited = max(0.0, start - ready / len(replied))
            self.frontend.retries.answered += len(replied)
            self._tally.answer(model.key.labels, parse, total, reply=waited, encode=now - start)
            observer = self._observer
            if observer.chooses or observer.times_all:
                in_time = now - observer.slow_seconds
                for answered, reply in zip(answers, replies, strict=True):
                    call = answered.call
                    chosen = call.observation is not None or call.arrived < in_time
                    if chosen and not isinstance(reply, ServiceError):
                        self._report(call, OK, now, start, answered.answer)


def _compress_and_respond(call: HotCall, reply: HttpReply, compress: Callable[[bytes | memoryview], bytes]) -> None:
    def respond(compressed: asyncio.Future[bytes]) -> None:
        if not call.disconnected:
            call.exchange.respond(compressed.result(), reply.headers)

    # In a thread: a large reply would hold up every other request on the event loop.
    compressing = asyncio.get_running_loop().run_in_executor(None, compress, reply.content)
    compressing.add_done_callback(respond)
