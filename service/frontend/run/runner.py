"""Runs the requests of every API: counts a decoded request, sends it to an engine, and writes its reply, in callbacks.

The answers that arrive in one tick of the event loop are written together, which makes each of them cheaper.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from random import random
from typing import Any, ClassVar

from msgspec import Struct, structs

from service.access.caller import Caller
from service.errors import InferenceFailed, InvalidInput, ServiceError, SessionConflict, TooLarge
from service.frontend.dispatch.connection import PendingRequest
from service.frontend.http1.request_heads import RequestHead
from service.frontend.rest import server_timing
from service.frontend.run.catalog import ServedModel
from service.frontend.run.exchange import AwaitedExchange, ClientDisconnected, Exchange, HttpReply, TaskExchange
from service.frontend.run.frontend import Frontend
from service.frontend.run.large_answers import LARGE_ANSWER_BYTES
from service.frontend.run.observation import EndedRequest, Observation, stage_seconds
from service.frontend.run.validation import PackedInputs
from service.ipc.messages.inference import Answer, Request
from service.ipc.messages.models import ModelKey
from service.ipc.messages.tracing import Api
from service.metrics import CUT_OFF, GONE, OK

MAX_ATTEMPTS = 3
"""A chunk is sent at most this many times, each time to the version that its session belonged to at the last attempt."""
NO_ANSWER = Answer()
UNKNOWN_MODEL_LABELS = ("unknown", "unknown")
"""Metric labels of a request that names no served model."""
Packer = Callable[[ServedModel], Awaitable[PackedInputs]]
"""Validates the inputs of a request for a model, and packs them; raises InvalidInput or TooLarge."""


class DecodedRequest(Struct, frozen=True):
    """A request whose body is decoded. version: None for the newest. context: data from which its runner writes the reply.

    session: the id of the session that the request belongs to, if there is one. pack: packs inputs that would occupy the event loop for
    long; None if the runner packs them. timed: whether the reply tells the time in each stage.
    """

    model: str
    version: str | int | None
    context: Any
    session: str | None = None
    pack: Packer | None = None
    timed: bool = False


class RunningRequest(Struct, eq=False):
    """One request, from its start to its reply. arrived, sent: monotonic times in seconds. lengths: the steps of its sequences.

    retired: the error of a request that does not continue a session, as its model is served no longer.
    """

    runner: RequestRunner
    exchange: Exchange
    model: ServedModel
    arrived: float
    sent: float
    decoded: DecodedRequest
    caller: Caller
    observation: Observation | None
    retired: ServiceError | None = None
    lengths: Sequence[int] = ()
    pending: PendingRequest | None = None
    attempts: int = 1
    sending: asyncio.Task[None] | None = None
    """Packs its inputs, or searches the version that its session belongs to."""
    answer: Answer = NO_ANSWER
    data: bytes | memoryview = b""
    """The engine's answer, and the bytes of its arrays."""
    disconnected: bool = False
    counted: bool = False
    """Whether its end is in the metrics."""

    def answered(self, answer: Answer, data: bytes | memoryview) -> None:
        self.pending = None  # it refers to this request: a cycle would stay in memory until the next full garbage collection
        self.answer, self.data = answer, data
        self.runner.collect(self)

    def failed(self, error: ServiceError) -> None:
        self.pending = None
        self.runner.fail_or_search(self, error)

    def disconnect(self) -> None:
        self.runner.cancel(self, GONE)

    def cut_off(self) -> None:
        """The service shuts down: cancel the request. The exchange is not used any more."""
        self.runner.cancel(self, CUT_OFF)

    def end(self, error: ServiceError) -> None:
        """Reply with an error, and cancel the request."""
        self.runner.end(self, error)


class RequestRunner(ABC):
    """Runs the requests of one endpoint, which belongs to `api`."""

    api: ClassVar[Api]

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self._tally = frontend.tally
        self._observer = frontend.observer
        self._answered: dict[ModelKey, list[RunningRequest]] = {}
        self._writing: set[asyncio.Task[None]] = set()

    @abstractmethod
    def accepts(self, head: RequestHead) -> bool:
        """See `Endpoint.accepts`."""

    @abstractmethod
    def decode(self, head: RequestHead, body: bytes) -> DecodedRequest | None:
        """Return the decoded request, or None for a body that would occupy the event loop for long; raises a ServiceError."""

    @abstractmethod
    def build(
        self, decoded: DecodedRequest, model: ServedModel, arrived: float, packed: PackedInputs | None
    ) -> tuple[Request, bytes | memoryview]:
        """Return the engine's request and its tensor bytes; raises a ServiceError. packed: the inputs, None if they are not packed yet."""

    @abstractmethod
    def write(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        """Return the reply to each request of one model, which is answered."""

    @abstractmethod
    async def write_large(self, model: ServedModel, call: RunningRequest) -> HttpReply:
        """Return the reply to a request whose answer would stall the event loop if it was written at once; raises a ServiceError."""

    def start(self, head: RequestHead, body: bytes, exchange: Exchange, arrived: float) -> RunningRequest | None:
        """See `Endpoint.start`."""
        try:
            if self.frontend.limits.starts.refusing:
                raise self.frontend.limits.starts.refuse()
            decoded = self.decode(head, body)
        except ServiceError as error:
            self.refuse(UNKNOWN_MODEL_LABELS, error, arrived, exchange, head.caller)
            raise
        return None if decoded is None else self.run(decoded, exchange, arrived, head.caller)

    def run(
        self,
        decoded: DecodedRequest,
        exchange: Exchange,
        arrived: float,
        caller: Caller,
        model: ServedModel | None = None,
    ) -> RunningRequest:
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
            if model is None and decoded.session is None:
                model = catalog.find(decoded.model, decoded.version)
            elif model is None:  # only an open session may still use a model that is not served any more
                model, retired = catalog.find_or_retired(decoded.model, decoded.version)
            call = RunningRequest(self, exchange, model, arrived, arrived, decoded, caller, observation, retired)
            if decoded.pack is None:
                try:
                    self._send(call, None)
                except ServiceError as error:
                    if not self._may_be_of_another_version(call, error):
                        raise
                    self.fail_or_search(call, error)
            else:
                call.sending = asyncio.ensure_future(self._send_slowly(call))
        except Exception as error:
            code = InferenceFailed.code
            if isinstance(error, ServiceError):
                code = error.code
                self.frontend.limits.retries.charge(error)
            labels = UNKNOWN_MODEL_LABELS if model is None else model.key.labels
            self._end_refused(exchange, labels, code, arrived, caller, observation)
            raise
        return call

    async def answer(self, decoded: DecodedRequest, exchange: AwaitedExchange, arrived: float, caller: Caller) -> HttpReply:
        """Run a decoded request and return its reply; raises a ServiceError. The request is cancelled with the task."""
        call = self.run(decoded, exchange, arrived, caller)
        try:
            return await exchange.reply()
        except asyncio.CancelledError:
            self.cancel(call, GONE if exchange.disconnected else CUT_OFF)
            raise

    @contextmanager
    def reading(
        self, exchange: TaskExchange, arrived: float, caller: Caller, labels: tuple[str, str] = UNKNOWN_MODEL_LABELS
    ) -> Iterator[None]:
        """Count a request that ends while a task reads and decodes its body. Exceptions pass through."""
        try:
            yield
        except ServiceError as error:
            self.refuse(labels, error, arrived, exchange, caller)
            raise
        except (Exception, asyncio.CancelledError) as error:
            outcome = InferenceFailed.code
            if isinstance(error, ClientDisconnected):
                outcome = GONE
            elif isinstance(error, asyncio.CancelledError):
                outcome = GONE if exchange.disconnected else CUT_OFF
            self._tally.accepted += 1
            self._end_refused(exchange, labels, outcome, arrived, caller, None)
            raise

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
        self.frontend.limits.retries.charge(error)
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

    def collect(self, call: RunningRequest) -> None:
        """Keep an answered request until the end of the tick."""
        if not self._answered:
            asyncio.get_running_loop().call_soon(self._write_answers)
        self._answered.setdefault(call.model.key, []).append(call)

    def fail(self, call: RunningRequest, error: ServiceError) -> None:
        """Reply with the error that a request ended with."""
        self._count_failure(call, error.code)
        self.frontend.limits.retries.charge(error)
        call.exchange.respond_error(error)

    def fail_or_search(self, call: RunningRequest, error: ServiceError) -> None:
        """Reply with the error, unless the request may succeed with the version that its session belongs to."""
        if not self._may_be_of_another_version(call, error):
            self.fail(call, error)
        elif call.attempts == MAX_ATTEMPTS:
            message = "another client keeps restarting this session while the chunk arrives: send one chunk after the other"
            self.fail(call, SessionConflict(message, field="session"))
        else:
            call.attempts += 1
            call.sending = asyncio.ensure_future(self._send_slowly(call, error))

    def cancel(self, call: RunningRequest, outcome: str) -> None:
        """Cancel a request that nothing waits for any longer. outcome: its label in the metrics."""
        self._stop(call)
        if not call.counted:
            self._count_failure(call, outcome)

    def end(self, call: RunningRequest, error: ServiceError) -> None:
        """End a request with an error before its answer."""
        self._stop(call)
        if not call.counted:
            self.fail(call, error)

    def _stop(self, call: RunningRequest) -> None:
        call.disconnected = True
        if call.pending is not None:
            self.frontend.dispatcher.cancel(call.pending)
            call.pending = None
        # A cancelled task refers to the request: a cycle would keep it until a garbage collection.
        sending, call.sending = call.sending, None
        if sending is not None:
            sending.cancel()

    def _send(self, call: RunningRequest, packed: PackedInputs | None) -> None:
        request, data = self.build(call.decoded, call.model, call.arrived, packed)
        request = call.caller.admit(request)
        if call.retired is not None:
            request = _continue_only(request, call.retired)
        if call.observation is not None or self._observer.times_all or call.decoded.timed:
            request = structs.replace(request, timed=True)
        call.lengths = request.lengths
        call.sent = request.sent
        call.pending = self.frontend.send(call.caller, request, data, call)

    async def _send_slowly(self, call: RunningRequest, error: ServiceError | None = None) -> None:
        """Send a request whose inputs `DecodedRequest.pack` packs, or, after an error, to the version that its session belongs to."""
        try:
            if error is not None:
                model = await self._model_of_session(call, error)
                if model is None:
                    self.fail(call, error)
                    return
                call.model, call.retired = model, None
            pack = call.decoded.pack
            self._send(call, None if pack is None else await pack(call.model))
        except Exception as failure:
            self.fail_or_search(call, self.frontend.error_for(failure))

    def _may_be_of_another_version(self, call: RunningRequest, error: ServiceError) -> bool:
        """Return whether a request to a session may have failed because the session belongs to another version.

        A session stays with the version that it began with, although a newer version may be served now. An input may be valid only for
        that version.
        """
        if call.decoded.session is None:
            return False
        if isinstance(error, SessionConflict):
            return error.elsewhere is not None
        return isinstance(error, InvalidInput | TooLarge) and self.frontend.catalog.has_other_versions(call.model.key)

    async def _model_of_session(self, call: RunningRequest, error: ServiceError) -> ServedModel | None:
        """Return the version that the session of a request belongs to, None unless the request allows it and it is another."""
        assert call.decoded.session is not None
        if isinstance(error, SessionConflict):
            key = error.elsewhere and ModelKey(*error.elsewhere)
        else:
            key = await self.frontend.dispatcher.model_of_session(call.caller.session(call.decoded.session))
        catalog, failed = self.frontend.catalog, call.model.key
        if not key or key == failed or key.name != call.model.spec.name or key not in catalog:
            return None
        return catalog[key] if call.decoded.version is None or key.version == failed.version else None

    def _count_failure(self, call: RunningRequest, outcome: str) -> None:
        call.counted = True
        now = time.monotonic()
        self._tally.fail(call.model.key.labels, outcome, now - call.arrived)
        self._report(call, outcome, now)

    def _report(
        self, call: RunningRequest, outcome: str, ended: float, received: float = 0.0, answer: Answer | None = None
    ) -> None:
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
        for calls in by_model.values():
            waiting = [call for call in calls if not call.disconnected]
            small = [call for call in waiting if len(call.data) <= LARGE_ANSWER_BYTES]
            if small:
                self._write_answers_of_model(small[0].model, small)
            if len(small) < len(waiting):
                for call in waiting:
                    if len(call.data) > LARGE_ANSWER_BYTES:
                        task = asyncio.ensure_future(self._write_large_answer(call))
                        self._writing.add(task)
                        task.add_done_callback(self._writing.discard)

    async def _write_large_answer(self, call: RunningRequest) -> None:
        start = time.monotonic()
        try:
            reply: HttpReply | ServiceError = await self.write_large(call.model, call)
        except Exception as error:
            reply = self.frontend.error_for(error)
        if not call.disconnected:
            self._send_replies(call.model, [call], [reply], start)

    def _write_answers_of_model(self, model: ServedModel, calls: list[RunningRequest]) -> None:
        start = time.monotonic()
        try:
            replies = self.write(model, calls)
        except Exception as error:
            replies = [self.frontend.internal_error(error)] * len(calls)
        self._send_replies(model, calls, replies, start)

    def _send_replies(
        self, model: ServedModel, calls: list[RunningRequest], replies: Sequence[HttpReply | ServiceError], start: float
    ) -> None:
        """Send the replies to requests of one model, and count these. start: when the writing of the replies began."""
        replied, ready = [], 0.0
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, ServiceError):
                self.fail(call, reply)
                continue
            call.counted = True
            replied.append(call)
            ready += call.answer.ready
            if call.decoded.timed:
                stages = stage_seconds(call.arrived, call.sent, start, time.monotonic(), call.answer)
                reply = structs.replace(reply, headers=reply.headers + server_timing.lines(stages))
            if reply.compress is None:
                call.exchange.respond(reply.content, reply.headers)
            else:
                _compress_and_respond(call, reply, reply.compress)
        if replied:
            now = time.monotonic()
            parse, total = [call.sent - call.arrived for call in replied], [now - call.arrived for call in replied]
            waited = max(0.0, start - ready / len(replied))
            self.frontend.limits.retries.answered += len(replied)
            self._tally.answer(model.key.labels, parse, total, reply=waited, encode=now - start)
            observer = self._observer
            if observer.chooses or observer.times_all:
                in_time = now - observer.slow_seconds
                for call, reply in zip(calls, replies, strict=True):
                    chosen = call.observation is not None or call.arrived < in_time
                    if chosen and not isinstance(reply, ServiceError):
                        self._report(call, OK, now, start, call.answer)


def _continue_only(request: Request, retired: ServiceError) -> Request:
    """Return a request that only continues a session, as its model is served no longer; raises `retired` for any other request."""
    if request.session is None or request.session_starts:
        raise retired
    return structs.replace(request, session_starts=False)


def _compress_and_respond(call: RunningRequest, reply: HttpReply, compress: Callable[[bytes | memoryview], bytes]) -> None:
    def respond(compressed: asyncio.Future[bytes]) -> None:
        if call.disconnected:
            return
        error = compressed.exception()
        if error is None:
            call.exchange.respond(compressed.result(), reply.headers)
        else:
            assert isinstance(error, Exception)
            call.exchange.respond_error(call.runner.frontend.internal_error(error))

    # In a thread: a large reply would hold up every other request on the event loop.
    compressing = asyncio.get_running_loop().run_in_executor(None, compress, reply.content)
    compressing.add_done_callback(respond)
