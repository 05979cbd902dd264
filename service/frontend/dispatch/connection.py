"""One engine as a frontend sees it: the requests sent to it, the answers it returned, and the wait to expect there.

Nothing here knows that there are other engines.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec import Struct

from service.errors import EngineLost, ServiceError
from service.ipc.async_channel import AsyncChannel
from service.ipc.blocks import ID, Buffer, encode_block, split_answers
from service.ipc.channel import MAX_COPIED_BYTES, Channel, Frame, encode
from service.ipc.messages.inference import (
    Answer,
    AnswerBlock,
    Backlog,
    BlockKey,
    Cancel,
    EngineStatus,
    LoadedModel,
    RefusalBlock,
    Release,
    Request,
    TrialBegan,
    TrialEnded,
)
from service.ipc.messages.message import Message, Refusal
from service.ipc.messages.models import ModelKey
from service.ipc.rpc import Rpc
from service.metrics import Metrics

DEADLINE_RESOLUTION_SECONDS = 0.005
"""A deadline is noticed at most this late."""
REQUEST_BYTES = 64
"""About how many bytes a request takes in the channel besides its values."""
MOST_COPIED = REQUEST_BYTES + MAX_COPIED_BYTES
"""A request with a larger size has a separate block, so that its values are not copied."""


class Answered(NamedTuple):
    """An engine's answer: the shapes, and the bytes of the arrays."""

    answer: Answer
    data: bytes | memoryview


class Receiver(Protocol):
    """Receives the end of one request: exactly one of the two calls, in a callback of the event loop."""

    def answered(self, answer: Answer, data: bytes | memoryview) -> None:
        """Take the engine's answer and the bytes of its arrays."""

    def failed(self, error: ServiceError) -> None:
        """Take the error that the request ended with."""


class PendingRequest(Struct, eq=False):
    """A request without an answer yet.

    `data` has the values of its steps. They are kept to send the request again: once to another engine, or to the next engine of its
    session. `at` is the engine that has the request, None while there is none. `orphaned` is true
    when an engine ended while it had the request. `done` is true once the receiver was called or no longer waits; `on_end` is called then.
    `block` is what it shares with the requests of its block. `size` is about how many bytes the request takes in the channel.
    """

    id: int
    request: Request
    data: bytes | memoryview
    receiver: Receiver
    deadlines: Deadlines
    block: BlockKey
    size: int
    attempts: int = 1
    orphaned: bool = False
    at: EngineConnection | None = None
    done: bool = False
    on_end: Callable[[], None] | None = None
    slot: int = 0
    """Set by `Deadlines`."""

    @property
    def key(self) -> ModelKey:
        """Return the request's model version."""
        return self.block.model

    def end(self) -> None:
        """Forget the request everywhere; its receiver is not called any more."""
        self.done = True
        self.deadlines.discard((self,))
        if self.at is not None:
            self.at.forget(self)
        if self.on_end is not None:
            self.on_end()

    def answer(self, answer: Answer, data: bytes | memoryview) -> None:
        """End the request with an answer."""
        self.end()
        self.receiver.answered(answer, data)

    def fail(self, error: ServiceError) -> None:
        """End the request with an error."""
        self.end()
        self.receiver.failed(error)


class Deadlines:
    """Calls `on_expired` with each request whose deadline passes while it is here.

    Requests whose deadlines fall into the same interval of DEADLINE_RESOLUTION_SECONDS expire together, at its end. All share one timer of
    the event loop, because a separate timer would cost more than the dispatch of the request.
    """

    def __init__(self, on_expired: Callable[[PendingRequest], None], clock: Callable[[], float]) -> None:
        self._on_expired = on_expired
        self._clock = clock
        self._slots: dict[int, set[PendingRequest]] = {}
        self._armed_slot = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def add(self, requests: Iterable[PendingRequest]) -> None:
        """Watch requests."""
        slots = self._slots
        for pending in requests:
            slot = pending.slot = -int(-pending.request.deadline // DEADLINE_RESOLUTION_SECONDS)  # rounded up
            watched = slots.get(slot)
            if watched is None:
                watched = slots[slot] = set()
                if slot < self._armed_slot:
                    self._arm(slot)
            watched.add(pending)

    def discard(self, requests: Iterable[PendingRequest]) -> None:
        """Stop watching requests."""
        slots = self._slots
        for pending in requests:
            watched = slots.get(pending.slot)
            if watched is not None:
                watched.discard(pending)
                if not watched:
                    del slots[pending.slot]

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_slot = slot
        seconds = max(0.0, slot * DEADLINE_RESOLUTION_SECONDS - self._clock())
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Expire what is due. The timer was set for the earliest slot of its time; by now that slot may be gone."""
        self._timer, self._armed_slot = None, math.inf
        now = self._clock()
        for slot in [slot for slot in self._slots if slot * DEADLINE_RESOLUTION_SECONDS <= now]:
            for pending in self._slots.pop(slot):
                self._on_expired(pending)
        if self._slots:
            self._arm(min(self._slots))


class PredictedWait:
    """The wait to expect at one engine, as far as a frontend can tell. Pure: the time is an argument.

    It is the backlog that the engine last reported, less the time since, plus the frontend's requests that the report does not include.
    """

    def __init__(self) -> None:
        self._reported = 0.0
        self._reported_at = 0.0
        self._prices: dict[int, float] = {}
        """The predicted seconds of the requests that the report does not include, and their sum."""
        self._sent_seconds = 0.0
        self._frames: deque[tuple[int, Sequence[int]]] = deque()
        """The requests that left in each frame since the report."""

    def report(self, seconds: float, frames: int, now: float) -> None:
        """Record the engine's report, which includes the first `frames` frames of this frontend."""
        self._reported, self._reported_at = seconds, now
        while self._frames and self._frames[0][0] <= frames:
            for id in self._frames.popleft()[1]:
                self._prices.pop(id, None)
        # Summed again at every report, so that rounding errors do not add up.
        self._sent_seconds = sum(self._prices.values())

    def add(self, prices: Mapping[int, float]) -> None:
        """Record the predicted seconds of requests that are about to leave, by their ids."""
        self._prices.update(prices)
        self._sent_seconds += sum(prices.values())

    def sent(self, ids: Sequence[int], frame: int) -> None:
        """Record that these requests left in frame number `frame`, counted from 1."""
        self._frames.append((frame, ids))

    def drop(self, ids: Iterable[int]) -> None:
        """Forget requests that were answered or cancelled."""
        prices = self._prices
        for id in ids:
            self._sent_seconds -= prices.pop(id, 0.0)
        if not prices:
            self._sent_seconds = 0.0
        while self._frames and prices.keys().isdisjoint(self._frames[0][1]):
            self._frames.popleft()

    def seconds(self, now: float) -> float:
        """Return how long a request sent now is expected to wait before it runs."""
        return max(0.0, self._reported - (now - self._reported_at)) + self._sent_seconds


class EngineOwner(Protocol):
    """Who connects to engines, and learns what becomes of them."""

    def next_id(self) -> int:
        """Return the id of a call, which no request or call of this frontend has."""

    def engine_met(self, engine: EngineConnection) -> None:
        """The engine has sent its first status."""

    def engine_lost(self, engine: EngineConnection) -> None:
        """The engine has ended. Its unanswered requests are still in `pending`."""

    def suspect_ended(self, engine: EngineConnection) -> None:
        """The engine has answered its suspect, or nothing waits for the answer any longer."""

    def version_passed(self, key: ModelKey) -> None:
        """The engine has run a version for the first time."""


class EngineConnection:
    """The channel to one engine, from its attachment to its end. `models` holds the models that the engine serves.

    `suspect` is the request that runs here because another engine ended while it had it. `on_trial` has the versions that the engine loads
    or runs for the first time.
    """

    def __init__(
        self, channel: Channel, metrics: Metrics, clock: Callable[[], float], owner: EngineOwner, deadlines: Deadlines
    ) -> None:
        """deadlines: of all requests of the owner."""
        self._metrics = metrics
        self._deadlines = deadlines
        self._clock = clock
        self._owner = owner
        self.wait = PredictedWait()
        """The wait to expect here."""
        self._handlers: dict[type[Message], Callable[[Frame, Any], None]] = {
            AnswerBlock: self._handle_answers,
            Backlog: self._handle_backlog,
            EngineStatus: self._handle_status,
            Refusal: self._handle_refusal,
            RefusalBlock: self._handle_refusals,
            TrialBegan: self._handle_trial_began,
            TrialEnded: self._handle_trial_ended,
        }
        self._channel = AsyncChannel(channel, self._handle_frame, self._lose, self._count_written, self._send_blocks)
        self.rpc = Rpc(self._send, "an engine", owner.next_id)
        self.models: dict[ModelKey, LoadedModel] = {}
        self.ready = False
        self.place = 0
        self.pending: dict[int, PendingRequest] = {}
        self.suspect: PendingRequest | None = None
        self.on_trial: set[ModelKey] = set()
        self._pending_bytes = 0
        self._blocks: dict[BlockKey, dict[int, PendingRequest]] = {}
        """Requests that leave at the end of the tick."""
        self._session_blocks: dict[str, BlockKey] = {}
        """The block of each session that has a chunk among them."""
        self._timed: set[BlockKey] = set()
        """The blocks with a request whose batches should be timed."""

    @property
    def pending_bytes(self) -> int:
        """Return the bytes of all requests and calls that the engine has not answered."""
        return self._pending_bytes + self.rpc.pending_bytes

    def submit(self, requests: Sequence[PendingRequest]) -> None:
        """Send requests of one block. Their receivers get the answers, or the error of a request that the engine refuses."""
        key, sessions, prices = requests[0].block, self._session_blocks, dict[int, float]()
        model, block = self.models.get(key.model), self._blocks.get(key)
        lengths, price = list[int](), 0.0
        for pending in requests:
            request, id, size = pending.request, pending.id, pending.size
            session = request.session
            pending.at = self
            self.pending[id] = pending
            self._pending_bytes += size
            if model is not None and request.lengths != lengths:
                lengths = request.lengths
                price = model.seconds(lengths)
            prices[id] = price
            if size > MOST_COPIED or (session is not None and sessions.get(session, key) is not key):
                self._send_blocks()  # the chunks of a session leave in their order
                block = None
            if session is not None:
                sessions[session] = key
            if block is None:
                block = self._blocks[key] = {}
                self._channel.flush_soon()
            block[id] = pending
            if request.timed:
                self._timed.add(key)
            if size > MOST_COPIED:
                self._send_blocks()
                block = None
        self.wait.add(prices)

    def release(self, key: ModelKey) -> None:
        """Tell the engine that this frontend sends no further requests for a model version."""
        self._send(encode(Release(key)))

    def cancel(self, pending: PendingRequest) -> None:
        """Tell the engine that nothing waits for a request any longer, unless it has not left yet."""
        if not any(block.pop(pending.id, None) for block in self._blocks.values()):
            self._channel.send_message(Cancel(), pending.id)

    def forget(self, pending: PendingRequest) -> None:
        """Remove a request from the pending requests and from the predicted wait."""
        if self.pending.pop(pending.id, None) is not None:
            self._pending_bytes -= pending.size
            self.wait.drop((pending.id,))
        if pending is self.suspect:
            self._end_suspect()

    def _end_suspect(self) -> None:
        self.suspect = None
        self._owner.suspect_ended(self)

    def close(self) -> None:
        """Close the channel; pending requests are lost."""
        self._channel.close()

    def _handle_frame(self, frame: Frame) -> None:
        handle = self._handlers.get(type(frame.message))
        if handle is not None:
            handle(frame, frame.message)
        else:
            self.rpc.handle_reply(frame)

    def _handle_status(self, frame: Frame, status: EngineStatus) -> None:
        self.models = {model.key: model for model in status.models}
        self.place = status.place
        if not self.ready:
            self.ready = True
            self._owner.engine_met(self)

    def _handle_backlog(self, frame: Frame, backlog: Backlog) -> None:
        self.wait.report(backlog.seconds, backlog.frames, self._clock())

    def _handle_answers(self, frame: Frame, block: AnswerBlock) -> None:
        requests, answers = list[PendingRequest](), list[tuple[Answer, Buffer]]()
        for id, answer, data in split_answers(block, frame.tail):
            request = self.pending.pop(id, None)
            if request is not None:
                requests.append(request)
                answers.append((answer, data))
                request.done = True
                self._pending_bytes -= request.size
                if request is self.suspect:
                    self._end_suspect()
                if request.on_end is not None:
                    request.on_end()
        self.wait.drop([request.id for request in requests])
        self._deadlines.discard(requests)
        for request, (answer, data) in zip(requests, answers, strict=True):
            request.receiver.answered(answer, data)

    def _handle_trial_began(self, frame: Frame, message: TrialBegan) -> None:
        self.on_trial.add(message.key)

    def _handle_trial_ended(self, frame: Frame, message: TrialEnded) -> None:
        self.on_trial.discard(message.key)
        if message.ran:
            self._owner.version_passed(message.key)

    def _handle_refusal(self, frame: Frame, refusal: Refusal) -> None:
        pending = self.pending.get(frame.id)
        if pending is not None:
            pending.fail(refusal.error)
        else:
            self.rpc.handle_reply(frame)

    def _handle_refusals(self, frame: Frame, block: RefusalBlock) -> None:
        for id in np.frombuffer(frame.tail, ID).tolist():
            pending = self.pending.get(id)
            if pending is not None:
                pending.fail(block.refusal.error)

    def _send(self, frame: bytes) -> None:
        """Send a message after all requests so far."""
        self._send_blocks()
        self._channel.send(frame)

    def _send_blocks(self) -> None:
        """Send the requests of this tick, a block for each key."""
        blocks, self._blocks = self._blocks, {}
        timed, self._timed = self._timed, set()
        self._session_blocks.clear()
        for key, block in blocks.items():
            if block:
                frame, following = encode_block(key, list(block.values()), timed=key in timed)
                self._channel.send(frame, following=following)
                self.wait.sent(list(block), self._channel.frames_sent)

    def _count_written(self, size: int, writes: int) -> None:
        self._metrics.channel_bytes.add("frontend", by=size)
        self._metrics.channel_writes.add("frontend", by=writes)

    def _lose(self) -> None:
        self.rpc.close(EngineLost("the engine ended before it replied: retry", retry_after=1))
        self._owner.engine_lost(self)
