"""All engines as a front sees them: one future per request, and the engine with the shortest wait for each.

It owns no queue; what it cannot hand over it refuses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from service.channel import Channel, Kind, encode
from service.errors import DeadlineExceeded, EngineLost, Overloaded, ServiceError, Unavailable
from service.faces.connection import Answered, Connection, Open
from service.metrics import Metrics
from service.sequence import Loaded, Request, Trace

TRACED_SECONDS = 60.0
"""An engine may take this much longer for a trace than was asked for: a GPU's profiler starts, and what it saw is written."""


class Engines:
    """Requests out, answers in. `met` says that an engine was ready once.

    `on_ready` is called each time an engine has said hello.
    """

    def __init__(
        self, metrics: Metrics, channel_bytes: int, on_ready: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_ready = on_ready
        self._metrics = metrics
        self._channel_bytes = channel_bytes
        self._clock = clock
        self._connections: list[Connection] = []
        """The one that was chosen longest ago comes first."""
        self._homeless: dict[int, Open] = {}
        """What was left by an engine when no other was ready."""
        self._last_id = 0
        self.met = False

    @property
    def ready(self) -> bool:
        return any(one.ready for one in self._connections)

    @property
    def models(self) -> list[Loaded]:
        """What the ready engines say they serve, each model once; empty while there is none."""
        ready = sorted((one for one in self._connections if one.ready), key=lambda one: one.place)
        keys = dict.fromkeys(key for one in ready for key in one.models)
        return [_everywhere([one.models[key] for one in ready if key in one.models]) for key in keys]

    def attach(self, channel: Channel) -> None:
        """A new engine; it is ready when its hello comes."""
        self._connections.append(Connection(channel, self._metrics, self._clock, self._meet, self._lose))

    async def submit(self, request: Request, tail: bytes) -> Answered:
        """Raises a ServiceError instead of an answer. When the awaiting task is cancelled, the engine is told."""
        if not self.ready:
            raise self._not_ready()
        waiting = self._enter(request, tail)
        # A timer of the loop, as asyncio.timeout takes as long as all the rest of this function.
        timer = asyncio.get_running_loop().call_later(request.deadline - self._clock(), self._expire, waiting)
        try:
            return await waiting.future
        except asyncio.CancelledError:
            if waiting.at is not None:
                waiting.at.cancel(waiting)
            raise
        finally:
            timer.cancel()
            self._forget(waiting)

    async def trace(self, turns: int, seconds: float) -> list[bytes]:
        """What every ready engine records from now on, each as a JSON array of trace events; raises a ServiceError when one does not."""
        if not self.ready:
            raise self._not_ready()
        wanted = Trace(turns, seconds)
        traces = [asyncio.ensure_future(one.trace(self._next_id(), wanted)) for one in self._connections if one.ready]
        try:
            async with asyncio.timeout(seconds + TRACED_SECONDS):
                return await asyncio.gather(*traces)
        except TimeoutError:
            late = "an engine did not give its trace in time: retry, or ask for fewer turns"
            raise Unavailable(late, retry_after=1) from None
        finally:
            for one in traces:
                one.cancel()

    def close(self) -> None:
        """Give the channels back; what is open is lost."""
        while self._connections:
            self._connections.pop().close()

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _enter(self, request: Request, tail: bytes) -> Open:
        id = self._next_id()
        frame = encode(Kind.SUBMIT, id, request, (tail,))
        engine = self._shortest(self._with_room(len(frame)))
        waiting = Open(id, request, frame, asyncio.get_running_loop().create_future())
        engine.submit(waiting)
        return waiting

    def _with_room(self, size: int) -> list[Connection]:
        """The ready engines that may be sent so many bytes more; raises Overloaded when there is none."""
        ready = [one for one in self._connections if one.ready]
        found = [one for one in ready if one.open_bytes + size <= self._channel_bytes]
        if not found:
            raise Overloaded(
                f"{min(one.open_bytes for one in ready)} bytes of requests are unanswered, this one has {size} and "
                f"SEQSERVE_CHANNEL_BYTES is {self._channel_bytes}: retry later, or raise SEQSERVE_CHANNEL_BYTES",
                retry_after=1,
            )
        return found

    def _shortest(self, engines: list[Connection]) -> Connection:
        """The one with the smallest predicted wait; of equals, the one that was chosen longest ago."""
        now = self._clock()
        chosen = min(engines, key=lambda one: one.wait_seconds(now))
        self._connections.remove(chosen)
        self._connections.append(chosen)
        return chosen

    def _expire(self, waiting: Open) -> None:
        """The deadline has passed."""
        if not waiting.future.done():
            if waiting.at is not None:
                waiting.at.cancel(waiting)
            waiting.future.set_exception(_too_late(waiting))

    def _not_ready(self) -> ServiceError:
        if self.met:
            return EngineLost("no engine is left and one is being replaced: retry later", retry_after=1)
        return Unavailable("the models are still loading: retry later, or wait for /readyz", retry_after=1)

    def _meet(self) -> None:
        """An engine is ready: what found no other is run again."""
        self.met = True
        self._on_ready()
        homeless, self._homeless = self._homeless, {}
        for waiting in homeless.values():
            self._run_again(waiting)

    def _lose(self, engine: Connection) -> None:
        """An engine has gone. What it had open goes to another at once; what was already run twice may be what ended it."""
        self._connections.remove(engine)
        for waiting in engine.open.values():
            waiting.at = None
            waiting.attempts += 1
            if waiting.future.done():
                continue
            if waiting.attempts > 2:
                lost = EngineLost("two engines ended while they had this request: it is not run a third time", retry_after=1)
                waiting.future.set_exception(lost)
            elif self.ready:
                self._run_again(waiting)
            else:
                self._homeless[waiting.id] = waiting

    def _run_again(self, waiting: Open) -> None:
        """It had its room in a channel: it is not refused for want of it in another."""
        self._shortest([one for one in self._connections if one.ready]).submit(waiting)
        self._metrics.rerun.add()

    def _forget(self, waiting: Open) -> None:
        self._homeless.pop(waiting.id, None)
        if waiting.at is not None:
            waiting.at.forget(waiting)


def _everywhere(loaded: list[Loaded]) -> Loaded:
    """One model on several engines: all their devices, each kernel once, the cost on the first."""
    devices, backends = [one.device for one in loaded], [backend for one in loaded for backend in one.backends]
    return msgspec.structs.replace(loaded[0], device=", ".join(devices), backends=list(dict.fromkeys(backends)))


def _too_late(waiting: Open) -> ServiceError:
    if waiting.attempts > 1:
        return EngineLost("an engine ended and no other answered before the deadline: retry", retry_after=1)
    return DeadlineExceeded("the deadline passed before the answer came: allow it more time, or send fewer requests")
