"""All engines as a front sees them: one future per request, and an engine for each: the one with the shortest wait, or its session's.

It owns no queue and no session; what it cannot hand over it refuses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from service.errors import DeadlineExceeded, EngineLost, Overloaded, ServiceError, Unavailable
from service.frontend.dispatch.connection import Answered, EngineConnection, PendingRequest
from service.frontend.dispatch.placement import home
from service.ipc import messages
from service.ipc.channel import Channel, encode, replace_message
from service.ipc.messages import LoadedModel, ModelKey, Request
from service.metrics import Metrics

TRACED_SECONDS = 60.0
"""An engine may take this much longer for a trace than was asked for: a GPU's profiler starts, and what it saw is written."""


class Dispatcher:
    """Requests out, answers in.

    `on_ready` is called each time an engine has said hello. `places` counts the engines that there are when none is being replaced.
    """

    def __init__(
        self,
        metrics: Metrics,
        channel_bytes: int,
        on_ready: Callable[[], None],
        places: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_ready = on_ready
        self._places = places
        self._metrics = metrics
        self._channel_bytes = channel_bytes
        self._clock = clock
        self._connections: list[EngineConnection] = []
        """The one that was chosen longest ago comes first."""
        self._homeless: dict[int, PendingRequest] = {}
        """What was left by an engine when no other was ready that could have it."""
        self._last_id = 0
        self._met = asyncio.Event()

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    @property
    def models(self) -> list[LoadedModel]:
        """What the ready engines say they serve, each model once; empty while there is none."""
        ready = sorted(self._ready, key=lambda one: one.place)
        keys = dict.fromkeys(key for one in ready for key in one.models)
        return [_everywhere([one.models[key] for one in ready if key in one.models]) for key in keys]

    async def meet_one(self, within_seconds: float) -> None:
        """Wait until an engine has said hello, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                await self._met.wait()

    def attach(self, channel: Channel) -> None:
        """A new engine; it is ready when its hello comes."""
        self._connections.append(EngineConnection(channel, self._metrics, self._clock, self._next_id, self._meet, self._lose))

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

    async def trace(self, batches: int, seconds: float) -> list[bytes]:
        """What every ready engine records from now on, each as a JSON array of trace events; raises a ServiceError when one does not."""
        if not self.ready:
            raise self._not_ready()
        recording = messages.RecordTrace(batches, seconds)
        calls = [
            asyncio.ensure_future(engine.rpc.call_done(recording, timeout=seconds + TRACED_SECONDS)) for engine in self._ready
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()

    async def export(self, session: str) -> bytes:
        """Return the state of a session, which stays open; raises a ServiceError."""
        return await self._call_home(session, messages.ExportSession(session))

    async def adopt(self, session: str, state: bytes) -> None:
        """Open a session with an exported state; raises a ServiceError."""
        await self._call_home(session, messages.ImportSession(session), state)

    async def model_of(self, session: str) -> ModelKey | None:
        """Return the model version of a session, None if it is not open; raises a ServiceError."""
        reply, _ = await self._home(session).rpc.call(messages.FindSession(session), messages.SessionFound)
        return reply.key

    async def end(self, session: str) -> None:
        """End a session; raises a ServiceError when it is not open."""
        await self._call_home(session, messages.EndSession(session))

    def release(self, key: ModelKey) -> None:
        """Nothing begins any more with this version that has not been sent by now."""
        for one in self._connections:
            one.release(key)

    def close(self) -> None:
        """Give the channels back; what is open is lost."""
        while self._connections:
            self._connections.pop().close()

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _enter(self, request: Request, tail: bytes) -> PendingRequest:
        id = self._next_id()
        frame = encode(request, id, (tail,))
        ready = self._serving(request.key) if request.session is None else [self._home(request.session)]
        engine = self._shortest(_with_room(ready, len(frame), self._channel_bytes))
        waiting = PendingRequest(id, request, frame, asyncio.get_running_loop().create_future())
        engine.submit(waiting)
        return waiting

    @property
    def _ready(self) -> list[EngineConnection]:
        return [one for one in self._connections if one.ready]

    def _serving(self, key: ModelKey) -> list[EngineConnection]:
        """The ready engines that serve it; all that are ready when none says so, as its word may still be on its way."""
        return [one for one in self._ready if key in one.models] or self._ready

    def _home(self, session: str) -> EngineConnection:
        """The engine that has this session, or is to have it; raises EngineLost while it is replaced."""
        place = home(session, self._places)
        for one in self._connections:
            if one.ready and one.place == place:
                return one
        if not self.ready:
            raise self._not_ready()
        raise EngineLost("the engine of this session is not ready: retry later, or begin another session", retry_after=1)

    async def _call_home(self, session: str, message: messages.Message, tail: bytes = b"") -> bytes:
        """Call the engine of a session; return the trailing bytes of its reply."""
        [engine] = _with_room([self._home(session)], len(tail), self._channel_bytes)
        return await engine.rpc.call_done(message, tail=tail)

    def _shortest(self, engines: list[EngineConnection]) -> EngineConnection:
        """The one with the smallest predicted wait; of equals, the one that was chosen longest ago."""
        now = self._clock()
        chosen = min(engines, key=lambda one: one.wait_seconds(now))
        self._connections.remove(chosen)
        self._connections.append(chosen)
        return chosen

    def _expire(self, waiting: PendingRequest) -> None:
        """The deadline has passed."""
        if not waiting.future.done():
            if waiting.at is not None:
                waiting.at.cancel(waiting)
            waiting.future.set_exception(_too_late(waiting))

    def _not_ready(self) -> ServiceError:
        if self._met.is_set():
            return EngineLost("no engine is left and one is being replaced: retry later", retry_after=1)
        return Unavailable("the models are still loading: retry later, or wait for /readyz", retry_after=1)

    def _meet(self, engine: EngineConnection) -> None:
        """An engine is ready: what found no other is run again, and what waits for this one hears what became of its session."""
        self._met.set()
        self._on_ready()
        homeless, self._homeless = self._homeless, {}
        for waiting in homeless.values():
            session = waiting.request.session
            if session is None:
                self._run_again(waiting)
            elif home(session, self._places) == engine.place:
                engine.submit(waiting)
            else:
                self._homeless[waiting.id] = waiting

    def _lose(self, engine: EngineConnection) -> None:
        """An engine has gone. What it had open goes to another at once, but a chunk of a session waits for the successor, which alone
        knows that the session is lost."""
        self._connections.remove(engine)
        for waiting in engine.pending.values():
            waiting.at, waiting.orphaned = None, True
            if waiting.future.done():
                continue
            if waiting.request.session is None:
                self._lose_stateless(waiting)
            else:
                waiting.frame = replace_message(waiting.frame, msgspec.structs.replace(waiting.request, resubmitted=True))
                self._homeless[waiting.id] = waiting

    def _lose_stateless(self, waiting: PendingRequest) -> None:
        """What was already run twice may be what ended the engines."""
        waiting.attempts += 1
        if waiting.attempts > 2:
            lost = EngineLost("two engines ended while they had this request: it is not run a third time", retry_after=1)
            waiting.future.set_exception(lost)
        elif self.ready:
            self._run_again(waiting)
        else:
            self._homeless[waiting.id] = waiting

    def _run_again(self, waiting: PendingRequest) -> None:
        """It had its room in a channel: it is not refused for want of it in another."""
        self._shortest(self._serving(waiting.request.key)).submit(waiting)
        self._metrics.rerun.add()

    def _forget(self, waiting: PendingRequest) -> None:
        self._homeless.pop(waiting.id, None)
        if waiting.at is not None:
            waiting.at.forget(waiting)


def _with_room(engines: list[EngineConnection], size: int, limit: int) -> list[EngineConnection]:
    """Those that may be sent so many bytes more; raises Overloaded when there is none."""
    found = [one for one in engines if one.pending_bytes + size <= limit]
    if not found:
        raise Overloaded(
            f"{min(one.pending_bytes for one in engines)} bytes of requests are unanswered, this one has {size} and "
            f"SEQSERVE_CHANNEL_BYTES is {limit}: retry later, or raise SEQSERVE_CHANNEL_BYTES",
            retry_after=1,
        )
    return found


def _everywhere(loaded: list[LoadedModel]) -> LoadedModel:
    """One model on several engines: all their devices, each kernel once, the cost on the first."""
    devices, backends = [one.device for one in loaded], [backend for one in loaded for backend in one.backends]
    return msgspec.structs.replace(loaded[0], device=", ".join(devices), backends=list(dict.fromkeys(backends)))


def _too_late(waiting: PendingRequest) -> ServiceError:
    if waiting.orphaned:
        return EngineLost("an engine ended and no other answered before the deadline: retry", retry_after=1)
    return DeadlineExceeded("the deadline passed before the answer came: allow it more time, or send fewer requests")
