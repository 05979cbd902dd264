"""All engines as a frontend sees them: it chooses an engine for every request and hands over the answer.

A stateless request goes to the engine with the smallest predicted wait, a session's chunk to the engine that holds the session. The
dispatcher has no queue and no session: it refuses requests that it cannot send.

When an engine ends, one of its requests may be the cause. These suspects run again, one at a time in each engine, even if several
frontends have some. Each frontend runs its shortest suspect first. Other requests run at the same time. So a request that ends a second
engine is identified, and the other requests of the first engine are answered.

A version that no engine has run yet may end every engine. Its requests go to one engine at a time, so the others keep serving, and an
engine that ends while it tries a version counts only against the requests of that version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from service.errors import DeadlineExceeded, EngineLost, Overloaded, ServiceError, Unavailable
from service.frontend.dispatch.connection import REQUEST_BYTES, Deadlines, EngineConnection, PendingRequest, Receiver
from service.frontend.dispatch.empty_rows import EmptyRows
from service.ipc.blocks import block_key
from service.ipc.channel import Channel
from service.ipc.messages.inference import BlockKey, LoadedModel, RecordTrace, Request
from service.ipc.messages.message import Message
from service.ipc.messages.models import ModelKey
from service.ipc.messages.sessions import EndSession, ExportSession, FindSession, ImportSession, SessionFound
from service.ipc.session_file import SessionFile
from service.ipc.session_placement import engine_of_session
from service.ipc.suspect_turns import SuspectTurns
from service.metrics import Metrics
from service.settings import Settings

TRACE_GRACE_SECONDS = 60.0
"""Extra time for a trace: the profiler of a GPU takes long to start and to write its events."""
MAX_ATTEMPTS = 2
"""A request is not sent to a third engine: it may be the cause of the failures."""
TURN_SECONDS = 0.005
"""How soon a frontend asks again for its turn to run a suspect, while another frontend runs one."""
HOLD_SECONDS = 30.0
"""How long a version with which an engine ended waits for that engine's successor. Other engines serve other models meanwhile."""

CHANNEL_BYTES = 64 << 20
"""Bytes of unanswered requests between a frontend and an engine. Four of the largest bodies always find room: the densest JSON, one digit
and a comma per token, doubles on its way to int32, so two do."""


UnsentRequest = tuple[Request, bytes | memoryview, Receiver, Callable[[], None] | None]
"""The first arguments of `Dispatcher.send`."""


def channel_limit(settings: Settings) -> int:
    """Return the most bytes of unanswered requests between a frontend and an engine; further requests are refused."""
    return max(CHANNEL_BYTES, 4 * settings.max_body_bytes)


class Dispatcher:
    """Sends requests to engines and returns their answers.

    `on_ready` is called each time an engine has connected. `engine_count` is the number of engines when none is being restarted.
    """

    def __init__(
        self,
        metrics: Metrics,
        channel_bytes: int,
        on_ready: Callable[[], None],
        engine_count: int = 1,
        clock: Callable[[], float] = time.monotonic,
        turns: SuspectTurns | None = None,
    ) -> None:
        """turns: of all frontends, None for a single frontend."""
        self._on_ready = on_ready
        self._engine_count = engine_count
        self._metrics = metrics
        self._channel_bytes = channel_bytes
        self._clock = clock
        self._connections: list[EngineConnection] = []
        self._ready: list[EngineConnection] = []
        """The engines that answer requests, least recently chosen first."""
        self._orphans: dict[int, PendingRequest] = {}
        """Chunks of sessions whose engine ended, until its successor is ready."""
        self._suspects: dict[int, PendingRequest] = {}
        """Requests of engines that ended. Each waits for an engine without another suspect."""
        self._turns = turns or SuspectTurns(-1)
        self._asking: asyncio.TimerHandle | None = None
        """Set while another frontend runs a suspect in an engine that this frontend needs."""
        self._passed: set[ModelKey] = set()
        """Versions that an engine has run."""
        self._deadly: dict[ModelKey, float] = {}
        """Other versions, with which an engine ended, and how long they wait for its successor."""
        self._deadlines = Deadlines(self._expire, clock)
        self._last_id = 0
        self._met = asyncio.Event()

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    @property
    def models(self) -> list[LoadedModel]:
        """Return the models that the ready engines serve, each model once."""
        engines = sorted(self._ready, key=lambda engine: engine.place)
        keys = dict.fromkeys(key for engine in engines for key in engine.models)
        return [_merged([engine.models[key] for engine in engines if key in engine.models]) for key in keys]

    async def wait_for_engine(self, seconds: float) -> None:
        """Wait until an engine has connected, for up to `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._met.wait()

    def attach(self, channel: Channel) -> None:
        """Add an engine. It is ready when its first status arrives."""
        self._connections.append(EngineConnection(channel, self._metrics, self._clock, self, self._deadlines))

    def send(
        self, request: Request, data: bytes | memoryview, receiver: Receiver, on_end: Callable[[], None] | None = None
    ) -> PendingRequest:
        """Send a request to an engine; raises a ServiceError.

        The receiver is called later, never before this function returns, and not at all after `cancel`. on_end: called once, at the end of
        a request that was sent.
        """
        if not self._ready:
            raise self._not_ready()
        if 0 in request.lengths and not request.ends_only:
            return self._send_without_empty(request, data, receiver, on_end)
        block = block_key(request)
        self._check_endangers(block.model)
        size = REQUEST_BYTES + len(data)
        engines = self._serving(block.model) if request.session is None else [self._engine_of(request.session)]
        engine = engines[0]
        if len(engines) > 1 or engine.pending_bytes + size > self._channel_bytes:
            engine = self._choose(_with_room(engines, size, self._channel_bytes))
        self._last_id += 1
        pending = PendingRequest(self._last_id, request, data, receiver, self._deadlines, block, size, on_end=on_end)
        engine.submit((pending,))
        self._deadlines.add((pending,))
        return pending

    def send_chunks(self, block: BlockKey, chunks: Sequence[UnsentRequest]) -> list[PendingRequest]:
        """Send chunks with steps that belong into one block, as `send` does one; raises a ServiceError and sends none."""
        self._check_endangers(block.model)
        only = self._engine_of("") if self._engine_count == 1 else None
        engines, last_id, pending = dict[EngineConnection, list[PendingRequest]](), self._last_id, list[PendingRequest]()
        for request, data, receiver, on_end in chunks:
            assert request.session is not None
            engine, size, last_id = only or self._engine_of(request.session), REQUEST_BYTES + len(data), last_id + 1
            sent = PendingRequest(last_id, request, data, receiver, self._deadlines, block, size, on_end=on_end)
            pending.append(sent)
            engines.setdefault(engine, []).append(sent)
        for engine, requests in engines.items():
            _with_room([engine], sum([request.size for request in requests]), self._channel_bytes)
        self._last_id = last_id
        for engine, requests in engines.items():
            engine.submit(requests)
        self._deadlines.add(pending)
        return pending

    def _send_without_empty(
        self, request: Request, data: bytes | memoryview, receiver: Receiver, on_end: Callable[[], None] | None
    ) -> PendingRequest:
        """Send the sequences of a request that have steps, if there are any; raises a ServiceError."""
        key = request.key
        known = next((engine.models[key].without_steps for engine in self._serving(key) if key in engine.models), None)
        if known is None:
            raise Unavailable(f"{key.name} is still loading: retry later", field="model", retry_after=1)
        rows = EmptyRows(request, data, known, receiver)
        rest, values = rows.rest()
        self._metrics.sequences.add(*key.labels, by=len(request.lengths) - len(rest.lengths))
        if rest.lengths:
            return self.send(rest, values, rows, on_end)
        pending = PendingRequest(self.next_id(), rest, values, receiver, self._deadlines, block_key(rest), 0, on_end=on_end)
        answered = rows.alone()
        asyncio.get_running_loop().call_soon(lambda: None if pending.done else pending.answer(*answered))
        return pending

    def cancel(self, pending: PendingRequest) -> None:
        """Tell the engine that nothing waits for a request any longer."""
        if not pending.done:
            self._withdraw(pending)
            pending.end()

    async def trace(self, batches: int, seconds: float) -> list[bytes]:
        """Record the next batches of every ready engine. Return a JSON array of trace events for each; raises a ServiceError."""
        if not self.ready:
            raise self._not_ready()
        recording = RecordTrace(batches, seconds)
        timeout = seconds + TRACE_GRACE_SECONDS
        calls = [asyncio.ensure_future(engine.rpc.call_done(recording, timeout=timeout)) for engine in self._ready]
        try:
            return [bytes(events) for events in await asyncio.gather(*calls)]
        finally:
            for call in calls:
                call.cancel()

    async def export_session(self, session: str) -> bytes | memoryview:
        """Return the state of a session, which stays open; raises a ServiceError."""
        return await self._call_engine_of(session, ExportSession(session))

    async def import_session(self, session: str, file: SessionFile, limit: int = 0) -> None:
        """Open a session with an exported state; raises a ServiceError. limit: open sessions of its tenant in one engine, 0 for none."""
        await self._call_engine_of(session, ImportSession(session, file.origin, file.tensors, limit), file.data)

    async def end_session(self, session: str) -> None:
        """End a session; raises a ServiceError when it is not open."""
        await self._call_engine_of(session, EndSession(session))

    async def model_of_session(self, session: str) -> ModelKey | None:
        """Return the model version of a session, None if it is not open; raises a ServiceError."""
        reply, _ = await self._engine_of(session).rpc.call(FindSession(session), SessionFound)
        return reply.key

    def has_requests_of(self, key: ModelKey) -> bool:
        """Return whether a request to a model version is not answered yet."""
        engines = [engine.pending for engine in self._connections]
        return any(
            pending.key == key for requests in (self._orphans, self._suspects, *engines) for pending in requests.values()
        )

    def release(self, key: ModelKey) -> None:
        """Tell every engine that this frontend sends no further requests for a model version."""
        for engine in self._connections:
            engine.release(key)
        self._passed.discard(key)
        if key in self._deadly:
            del self._deadly[key]
            for pending in [pending for pending in self._suspects.values() if pending.key == key]:
                del self._suspects[pending.id]
                pending.fail(EngineLost(f"engines ended with {key.name} version {key.version}: it is not served any more"))

    def close(self) -> None:
        """Close the channels; pending requests are lost."""
        self._deadlines.close()
        if self._asking is not None:
            self._asking.cancel()
        while self._connections:
            self._connections.pop().close()

    # The owner of the connections to engines.

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def engine_met(self, engine: EngineConnection) -> None:
        """Send the chunks of its sessions, and a suspect, to an engine that is ready now."""
        # Not before: another frontend that did not know the end of the last engine here yet would have sent a suspect to it.
        self._turns.give_back(engine.place)
        self._ready.append(engine)
        self._met.set()
        self._on_ready()
        orphans, self._orphans = self._orphans, {}
        for pending in orphans.values():
            assert pending.request.session is not None
            if engine_of_session(pending.request.session, self._engine_count) == engine.place:
                engine.submit((pending,))
            else:
                self._orphans[pending.id] = pending
        self._run_suspects()

    def suspect_ended(self, engine: EngineConnection) -> None:
        """Run further suspects after the suspect of this engine has ended."""
        self._turns.give_back(engine.place)
        self._run_suspects()

    def version_passed(self, key: ModelKey) -> None:
        """Note that an engine has run this version."""
        self._passed.add(key)
        if key in self._deadly:
            del self._deadly[key]
            self._run_suspects()

    def engine_lost(self, engine: EngineConnection) -> None:
        """Keep the requests of an engine that has ended, to run them again.

        A stateless request goes to another engine at its turn. A session's chunk waits for the restarted engine, which alone knows that the
        session is lost.
        """
        self._connections.remove(engine)
        if engine in self._ready:
            self._ready.remove(engine)
        on_trial = engine.on_trial - self._passed
        if on_trial:
            self._deadly |= dict.fromkeys(on_trial, self._clock() + HOLD_SECONDS)
            asyncio.get_running_loop().call_later(HOLD_SECONDS, self._run_suspects)
        for pending in sorted(engine.pending.values(), key=lambda pending: sum(pending.request.lengths)):
            pending.at, pending.orphaned = None, True
            if pending.request.session is None:
                self._suspect(pending, counts=not on_trial or pending.key in on_trial)
            else:
                pending.request = msgspec.structs.replace(pending.request, resubmitted=True)
                pending.block = block_key(pending.request)
                self._orphans[pending.id] = pending
        self._run_suspects()

    # The choice of an engine.

    def _serving(self, key: ModelKey) -> list[EngineConnection]:
        """Return the ready engines to which requests of a version may go: all that serve it, or a single one until it has run there.

        If none serves it, all may: the status of an engine may still be on its way.
        """
        if len(self._ready) == 1:
            return self._ready
        serving = [engine for engine in self._ready if key in engine.models] or self._ready
        # All frontends choose the same engine.
        return serving if key in self._passed or not serving else [min(serving, key=lambda engine: engine.place)]

    def _endangers_last(self, key: ModelKey) -> bool:
        """Return whether a version may end an engine while another is missing: the remaining engines serve the other models."""
        return key in self._deadly and len(self._ready) < self._engine_count and self._clock() < self._deadly[key]

    def _check_endangers(self, key: ModelKey) -> None:
        """Raise EngineLost for a version that may end the last engine."""
        if self._deadly and self._endangers_last(key):
            raise EngineLost(
                f"an engine ended with {key.name} version {key.version}: retry later", field="model", retry_after=1
            )

    def _engine_of(self, session: str) -> EngineConnection:
        """Return the engine that holds a session, or will hold it; raises EngineLost while that engine restarts."""
        place = engine_of_session(session, self._engine_count)
        for engine in self._ready:
            if engine.place == place:
                return engine
        if not self.ready:
            raise self._not_ready()
        raise EngineLost("the engine of this session is not ready: retry later, or start another session", retry_after=1)

    async def _call_engine_of(self, session: str, message: Message, tail: bytes | memoryview = b"") -> bytes | memoryview:
        """Call the engine of a session. Return the trailing bytes of its reply."""
        [engine] = _with_room([self._engine_of(session)], len(tail), self._channel_bytes)
        return await engine.rpc.call_done(message, tail=tail)

    def _choose(self, engines: list[EngineConnection]) -> EngineConnection:
        """Return the engine with the smallest predicted wait; among equals, the engine that was chosen longest ago."""
        if len(engines) == 1:
            return engines[0]
        now = self._clock()
        chosen = min(engines, key=lambda engine: engine.wait.seconds(now))
        self._ready.remove(chosen)
        self._ready.append(chosen)
        return chosen

    def _expire(self, pending: PendingRequest) -> None:
        """Fail a request whose deadline has passed."""
        self._withdraw(pending)
        pending.fail(_deadline_error(pending))

    def _withdraw(self, pending: PendingRequest) -> None:
        """Take a request back from its engine, or from the requests that wait for an engine."""
        self._orphans.pop(pending.id, None)
        self._suspects.pop(pending.id, None)
        if pending.at is not None:
            pending.at.cancel(pending)

    def _not_ready(self) -> ServiceError:
        if self._met.is_set():
            return EngineLost("no engine is running and one is being restarted: retry later", retry_after=1)
        return Unavailable("the models are still loading: retry later, or wait for /readyz", retry_after=1)

    def _suspect(self, pending: PendingRequest, *, counts: bool) -> None:
        """Keep a request to run it again, unless it has used its attempts. counts: whether the last attempt counts."""
        pending.attempts += counts
        if pending.attempts > MAX_ATTEMPTS:
            message = "two engines ended while they had this request: it is not sent to a third"
            pending.fail(EngineLost(message, retry_after=1))
        else:
            self._suspects[pending.id] = pending

    def _run_suspects(self) -> None:
        """Send a suspect to each ready engine that has none. The channel limit does not apply: the request was accepted once."""
        taken = set[int]()  # by suspects of other frontends
        for pending in list(self._suspects.values()):
            if self._endangers_last(pending.key):
                continue
            free = [engine for engine in self._serving(pending.key) if engine.suspect is None and engine.place not in taken]
            while free:
                engine = self._choose(free)
                if self._turns.take(engine.place):
                    self._run_suspect(pending, engine)
                    break
                taken.add(engine.place)
                free.remove(engine)
            if all(engine.suspect is not None or engine.place in taken for engine in self._ready):
                break
        self._ask_again(taken)

    def _run_suspect(self, pending: PendingRequest, engine: EngineConnection) -> None:
        del self._suspects[pending.id]
        engine.suspect = pending
        engine.submit((pending,))
        self._metrics.rerun.add()

    def _ask_again(self, taken: set[int]) -> None:
        """Ask again soon for the engines that are taken, if a suspect is left. Release the turns at all other engines."""
        if self._asking is not None:
            self._asking.cancel()
        wanted = taken if self._suspects else set()
        self._asking = asyncio.get_running_loop().call_later(TURN_SECONDS, self._run_suspects) if wanted else None
        for engine in self._ready:
            if engine.suspect is None and engine.place not in wanted:
                self._turns.give_back(engine.place)


def _with_room(engines: list[EngineConnection], size: int, limit: int) -> list[EngineConnection]:
    """Return the engines whose channel has room for `size` more bytes; raises Overloaded when there is none."""
    with_room = [engine for engine in engines if engine.pending_bytes + size <= limit]
    if not with_room:
        raise Overloaded(
            f"{min(engine.pending_bytes for engine in engines)} bytes of requests are unanswered, this request has {size} and "
            f"the limit of the channel is {limit}: retry later, or send less at once",
            retry_after=1,
        )
    return with_room


def _merged(loaded: list[LoadedModel]) -> LoadedModel:
    """Return one entry for a model on several engines: all devices, each kernel once, the cost on the first engine."""
    devices, backends = [model.device for model in loaded], [backend for model in loaded for backend in model.backends]
    return msgspec.structs.replace(loaded[0], device=", ".join(devices), backends=list(dict.fromkeys(backends)))


def _deadline_error(pending: PendingRequest) -> ServiceError:
    if pending.orphaned:
        return EngineLost("an engine ended and no other answered before the deadline: retry", retry_after=1)
    return DeadlineExceeded("the deadline passed before the answer arrived: allow more time, or send fewer requests")
