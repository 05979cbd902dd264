"""The front's end of the engine: one future per request. It owns no queue; what it cannot hand over it refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from service.channel import Channel, Frame, Kind, encode
from service.errors import BY_CODE, DeadlineExceeded, EngineLost, InferenceFailed, Overloaded, ServiceError, Unavailable
from service.metrics import Metrics
from service.sequence import Answer, Hello, Loaded, Refusal, Request


class Answered(NamedTuple):
    """What came back: the shapes, and the arrays' bytes."""

    answer: Answer
    data: bytes


@dataclass(slots=True)
class _Open:
    """A request that has no answer yet. `frame` is kept so that it can be run again once by the next engine."""

    frame: bytes
    future: asyncio.Future[Answered]
    attempts: int = 1


class Engines:
    """Requests out, answers in. `models` is what the engine says it serves, empty while there is none.

    `on_ready` is called each time an engine has said hello.
    """

    def __init__(self, metrics: Metrics, channel_bytes: int, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        self._metrics = metrics
        self._channel_bytes = channel_bytes
        self._channel: Channel | None = None
        self._open: dict[int, _Open] = {}
        self._open_bytes = 0
        self._last_id = 0
        self._flushing = False
        self.models: list[Loaded] = []
        self.met = False

    @property
    def ready(self) -> bool:
        return bool(self.models)

    def attach(self, channel: Channel) -> None:
        """A new engine; it is ready when its hello comes."""
        self._lose()
        self._channel = channel
        asyncio.get_running_loop().add_reader(channel.fileno(), self._receive)

    async def submit(self, request: Request, tail: bytes) -> Answered:
        """Raises a ServiceError instead of an answer. When the awaiting task is cancelled, the engine is told."""
        if not self.ready:
            raise self._not_ready()
        id, waiting = self._enter(request, tail)
        # A timer of the loop, as asyncio.timeout takes as long as all the rest of this function.
        timer = asyncio.get_running_loop().call_later(request.deadline - time.monotonic(), self._expire, id)
        try:
            return await waiting.future
        except asyncio.CancelledError:
            self._send(encode(Kind.CANCEL, id))
            raise
        finally:
            timer.cancel()
            self._open.pop(id, None)
            self._open_bytes -= len(waiting.frame)

    def close(self) -> None:
        """Give the channel back; what is open is lost."""
        self._lose()

    def _enter(self, request: Request, tail: bytes) -> tuple[int, _Open]:
        self._last_id += 1
        frame = encode(Kind.SUBMIT, self._last_id, request, (tail,))
        if self._open_bytes + len(frame) > self._channel_bytes:
            raise Overloaded(
                f"{self._open_bytes} bytes of requests are unanswered, this one has {len(frame)} and "
                f"SEQSERVE_CHANNEL_BYTES is {self._channel_bytes}: retry later, or raise SEQSERVE_CHANNEL_BYTES",
                retry_after=1,
            )
        waiting = self._open[self._last_id] = _Open(frame, asyncio.get_running_loop().create_future())
        self._open_bytes += len(frame)
        self._send(frame)
        return self._last_id, waiting

    def _expire(self, id: int) -> None:
        """The deadline has passed."""
        waiting = self._open[id]
        if not waiting.future.done():
            self._send(encode(Kind.CANCEL, id))
            waiting.future.set_exception(self._too_late(waiting))

    def _not_ready(self) -> ServiceError:
        if self.met:
            return EngineLost("the engine ended and is being replaced: retry later", retry_after=1)
        return Unavailable("the models are still loading: retry later, or wait for /readyz", retry_after=1)

    def _too_late(self, waiting: _Open) -> ServiceError:
        if waiting.attempts > 1 or not self.ready:
            return EngineLost("the engine ended and its successor did not answer before the deadline: retry", retry_after=1)
        return DeadlineExceeded("the deadline passed before the answer came: allow it more time, or send fewer requests")

    def _send(self, frame: bytes) -> None:
        """Queue a frame; all frames of this loop tick leave in one write at its end."""
        if self._channel is None:
            return
        self._channel.send(frame)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        channel = self._channel
        if channel is None:
            return
        bytes_before, writes_before = channel.bytes_sent, channel.writes
        done = channel.flush()
        self._metrics.channel_bytes.add("front", by=channel.bytes_sent - bytes_before)
        self._metrics.channel_writes.add("front", by=channel.writes - writes_before)
        if not channel.open:
            self._lose()
        elif done:
            asyncio.get_running_loop().remove_writer(channel.fileno())
        else:
            asyncio.get_running_loop().add_writer(channel.fileno(), self._flush)

    def _receive(self) -> None:
        channel = self._channel
        assert channel is not None
        for frame in channel.receive():
            if frame.kind == Kind.HELLO:
                self._meet(frame.read(Hello))
            else:
                self._settle(frame)
        if not channel.open:
            self._lose()

    def _meet(self, hello: Hello) -> None:
        """The engine is ready: what its predecessor left open is run again, once."""
        self.models = hello.models
        self.met = True
        self._on_ready()
        for waiting in self._open.values():
            self._send(waiting.frame)
            self._metrics.rerun.add()

    def _settle(self, frame: Frame) -> None:
        waiting = self._open.get(frame.id)
        if waiting is None or waiting.future.done():
            return
        if frame.kind == Kind.ANSWER:
            waiting.future.set_result(Answered(frame.read(Answer), frame.tail))
        elif frame.kind == Kind.REFUSAL:
            waiting.future.set_exception(_error(frame.read(Refusal)))

    def _lose(self) -> None:
        """The engine has gone. What was open waits for its successor; what was already run twice may be what killed it."""
        channel, self._channel, self.models = self._channel, None, []
        if channel is None:
            return
        asyncio.get_running_loop().remove_reader(channel.fileno())
        asyncio.get_running_loop().remove_writer(channel.fileno())
        channel.close()
        for waiting in self._open.values():
            waiting.attempts += 1
            if waiting.attempts > 2 and not waiting.future.done():
                lost = EngineLost("two engines ended while they had this request: it is not run a third time", retry_after=1)
                waiting.future.set_exception(lost)


def _error(refusal: Refusal) -> ServiceError:
    kind = BY_CODE.get(refusal.code, InferenceFailed)
    return kind(refusal.message, field=refusal.field, retry_after=refusal.retry_after)
