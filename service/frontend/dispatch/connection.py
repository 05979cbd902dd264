"""One engine as a front sees it: what it was sent, what came back, and how long a request would wait there.

Nothing here knows that there are other engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.errors import EngineLost
from service.ipc.channel import Channel, Frame, Kind, encode
from service.ipc.messages import Answer, EngineStatus, LoadedModel, ModelKey, Refusal, Request
from service.metrics import Metrics


class Answered(NamedTuple):
    """What came back: the shapes, and the arrays' bytes."""

    answer: Answer
    data: bytes


@dataclass(slots=True, eq=False)
class Open:
    """A request that has no answer yet. `frame` is kept so that it can be sent again: once to another engine, or to its session's next one.

    `at` is the engine that has it, None while there is none; `orphaned` says that one ended that had it.
    """

    id: int
    request: Request
    frame: bytes
    future: asyncio.Future[Answered]
    attempts: int = 1
    orphaned: bool = False
    at: Connection | None = None


class Backlog:
    """How long a request would wait at one engine, as far as a front can tell. Pure: the time is an argument.

    It is what the engine last reported, less the time since, and what the front has sent that the report does not count.
    """

    def __init__(self) -> None:
        self._reported = 0.0
        self._at = 0.0
        self._sent: dict[int, tuple[int, float]] = {}

    def report(self, seconds: float, frames: int, now: float) -> None:
        """The engine's word, which counts the first `frames` frames of this front."""
        self._reported, self._at = seconds, now
        self._sent = {id: (frame, price) for id, (frame, price) in self._sent.items() if frame > frames}

    def add(self, id: int, frame: int, seconds: float) -> None:
        """A request of so many predicted `seconds` has left as this `frame`, counted from 1."""
        self._sent[id] = frame, seconds

    def drop(self, id: int) -> None:
        """A request was answered or given up."""
        self._sent.pop(id, None)

    def wait_seconds(self, now: float) -> float:
        return max(0.0, self._reported - (now - self._at)) + sum(seconds for _, seconds in self._sent.values())


class Connection:
    """The channel to one engine, from its attachment to its end. `models` is what it says it serves.

    `on_met` is called at its hello, `on_lost` once, when it has gone; the requests that it has not answered are then still `open`.
    """

    def __init__(
        self,
        channel: Channel,
        metrics: Metrics,
        clock: Callable[[], float],
        on_met: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._channel = channel
        self._metrics = metrics
        self._clock = clock
        self._on_met = on_met
        self._on_lost = on_lost
        self._backlog = Backlog()
        self._flushing = False
        self.models: dict[ModelKey, LoadedModel] = {}
        self._met = False
        self.place = 0
        self.open: dict[int, Open] = {}
        self.open_bytes = 0
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        asyncio.get_running_loop().add_reader(channel.fileno(), self._receive)

    @property
    def ready(self) -> bool:
        return self._met

    def wait_seconds(self, now: float) -> float:
        """How long a request that comes now is expected to wait here before it runs."""
        return self._backlog.wait_seconds(now)

    def submit(self, waiting: Open) -> None:
        """Its answer, or the error that the engine refuses it with, becomes the result of its future."""
        waiting.at = self
        self.open[waiting.id] = waiting
        self.open_bytes += len(waiting.frame)
        self._send(waiting.frame)
        model = self.models.get(waiting.request.key)
        self._backlog.add(waiting.id, self._channel.frames_sent, model.seconds(waiting.request.lengths) if model else 0.0)

    async def ask(self, kind: Kind, id: int, body: Any, tail: bytes = b"") -> bytes:
        """The bytes of the one frame that answers a question; raises what the engine refuses it with, or EngineLost."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        frame = encode(kind, id, body, (tail,))
        self._questions[id] = future
        self.open_bytes += len(frame)
        self._send(frame)
        try:
            return await future
        except asyncio.CancelledError:
            self._send(encode(Kind.CANCEL, id))
            raise
        finally:
            self.open_bytes -= len(frame)
            del self._questions[id]

    def release(self, key: ModelKey) -> None:
        """Nothing begins any more with this version that has not been sent by now."""
        self._send(encode(Kind.RELEASE, 0, key))

    def cancel(self, waiting: Open) -> None:
        """Nobody waits for it any more: the engine is told."""
        self._send(encode(Kind.CANCEL, waiting.id))

    def forget(self, waiting: Open) -> None:
        """It is no longer open: its bytes and its seconds make room."""
        if self.open.pop(waiting.id, None) is not None:
            self.open_bytes -= len(waiting.frame)
            self._backlog.drop(waiting.id)

    def close(self) -> None:
        """Give the channel back; what is open is lost."""
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        asyncio.get_running_loop().remove_writer(self._channel.fileno())
        self._channel.close()

    def _send(self, frame: bytes) -> None:
        """Queue a frame; all frames of this loop tick leave in one write at its end."""
        self._channel.send(frame)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        channel = self._channel
        if not channel.open:
            return
        bytes_before, writes_before = channel.bytes_sent, channel.writes
        done = channel.flush()
        self._metrics.channel_bytes.add("frontend", by=channel.bytes_sent - bytes_before)
        self._metrics.channel_writes.add("frontend", by=channel.writes - writes_before)
        if not channel.open:
            self._lose()
        elif done:
            asyncio.get_running_loop().remove_writer(channel.fileno())
        else:
            asyncio.get_running_loop().add_writer(channel.fileno(), self._flush)

    def _receive(self) -> None:
        for frame in self._channel.receive():
            self._handle_frame(frame)
        if not self._channel.open:
            self._lose()

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.ENGINE_STATUS:
            self._meet(frame.read(EngineStatus))
        elif frame.kind == Kind.LOAD:
            self._backlog.report(frame.read(float), frame.id, self._clock())
        elif frame.id in self._questions:
            _settle_question(self._questions[frame.id], frame)
        else:
            self._settle(frame)

    def _meet(self, status: EngineStatus) -> None:
        self.models = {one.key: one for one in status.models}
        self.place = status.place
        if not self._met:
            self._met = True
            self._on_met(self)

    def _settle(self, frame: Frame) -> None:
        waiting = self.open.get(frame.id)
        if waiting is None or waiting.future.done():
            return
        if frame.kind == Kind.ANSWER:
            waiting.future.set_result(Answered(frame.read(Answer), frame.tail))
        elif frame.kind == Kind.REFUSAL:
            waiting.future.set_exception(frame.read(Refusal).error)
        self.forget(waiting)

    def _lose(self) -> None:
        self.close()
        for future in self._questions.values():
            if not future.done():
                future.set_exception(EngineLost("the engine ended before it answered this: retry", retry_after=1))
        self._on_lost(self)


def _settle_question(future: asyncio.Future[bytes], frame: Frame) -> None:
    if future.done():
        return
    if frame.kind == Kind.REFUSAL:
        future.set_exception(frame.read(Refusal).error)
    else:
        future.set_result(frame.tail)
