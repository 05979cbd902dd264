"""The engine process's loop, with its supervisor and a front whom the test plays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from service.engine.batch import Batch
from service.engine.batching.batcher import Batcher
from service.engine.batching.ticket import Refuse, Reply, Ticket
from service.engine.execution.cuda_graph_runner import Between
from service.engine.execution.device_engine import Prepared, Watcher
from service.engine.loading import ModelLoader
from service.engine.worker import FRAMES_PER_BATCH, Worker
from service.ipc.channel import Channel, Frame, encode, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages import (
    Answer,
    Attach,
    Backlog,
    Cancel,
    CollectMetrics,
    Done,
    EngineStatus,
    LoadedModel,
    MetricsCollected,
    ModelKey,
    ModelVersion,
    RecordTrace,
    Refusal,
    Request,
)
from service.log import Log
from service.metrics import Metrics
from tests.engine.batching.fakes import request

PLACE = 3
SECONDS = 2.5
"""Of each request that waits."""
TURNS = 6
"""Enough for every test. In the one that follows the front has gone, in the one after that the supervisor."""


class OneATurn(Batcher):
    """Answers one request a turn, then calls `after` with the number of the turn."""

    def __init__(self, after: Callable[[int], None]) -> None:
        self._after = after
        self._turns = 0
        self._replies: list[Reply] = []
        self._since = 0
        self.most_between = 0
        """Requests between two turns."""

    @property
    def waiting(self) -> int:
        return 1

    @property
    def idle(self) -> bool:
        return False

    def count(self) -> None:
        pass

    def backlog_seconds(self) -> float:
        return SECONDS * len(self._replies)

    def submit(self, request: Request, data: bytes, reply: Reply, refuse: Refuse, *, again: bool = False) -> Ticket:
        self._replies.append(reply)
        self._since += 1
        self.most_between = max(self.most_between, self._since)
        return Ticket(request, reply, refuse)

    def cancel(self, ticket: Ticket) -> None:
        self._replies.clear()

    def step(self, before_launch: object = None) -> bool:
        self._since = 0
        if self._replies:
            self._replies.pop(0)(Answer((1, 1)), [b"1234"])
        self._turns += 1
        self._after(self._turns)
        return True


class Idle:
    """An engine that has nothing to do."""

    running: tuple[float, float] | None = None

    device = "cpu"

    def __init__(self) -> None:
        self.versions = [ModelKey("words", "1")]

    def predicted_seconds(self, batch: Batch) -> float:
        return 0.0

    def loaded(self) -> list[LoadedModel]:
        return [LoadedModel(*key.labels, self.device, [], 0, generation=key.generation) for key in self.versions]

    def serves(self, key: ModelKey) -> bool:
        return key in self.versions

    def open(self, key: ModelKey, prepared: Prepared) -> None:
        self.versions.append(key)

    def close(self, key: ModelKey) -> None:
        self.versions.remove(key)

    def count_memory(self) -> None:
        pass

    def watch(self, watcher: Watcher | None) -> None:
        pass


class House:
    """A worker that a supervisor has told of one front. What it said to both is kept."""

    def __init__(self) -> None:
        mine, theirs = pair()
        self.supervisor, self._control = Channel(mine), Channel(theirs)
        self.frontend, self.heartbeat, self.metrics = self._attached(), Heartbeat(), Metrics()
        self.engine = Idle()
        self.to_front: list[Frame] = []
        self.to_supervisor: list[Frame] = []
        self.batcher = OneATurn(self._after)
        models = ModelLoader(self.engine, self.batcher, self._prepared, Log("worker"))
        self._worker = Worker(self._control, self.heartbeat, self.batcher, self.engine, models, PLACE, self.metrics)

    def run(self) -> None:
        self.supervisor.flush()
        self.frontend.flush()
        self._worker.run()

    def close(self) -> None:
        for channel in (self.supervisor, self._control, self.frontend):
            channel.close()
        self.heartbeat.close()

    def _prepared(self, model_version: ModelVersion, between_batches: Between) -> Prepared:
        raise AssertionError("nothing is loaded")

    def _attached(self) -> Channel:
        mine, theirs = pair()
        self.supervisor.send(encode(Attach()), attached=theirs)
        theirs.close()
        return Channel(mine)

    def _after(self, batch: int) -> None:
        if batch == TURNS:
            self.to_front = self.frontend.receive()
            self.frontend.close()
        elif batch == TURNS + 1:
            self.to_supervisor = self.supervisor.receive()
            self.supervisor.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def test_a_front_is_told_with_each_answer_what_is_left_and_how_many_of_its_frames_are_counted_in_that(house: House) -> None:
    house.frontend.send(encode(request([2]), 7, (b"",)))
    house.frontend.send(encode(Cancel(), 6))
    house.frontend.send(encode(request([2]), 8, (b"",)))
    house.run()
    status, *frames = house.to_front
    assert isinstance(status.message, EngineStatus) and status.message.place == PLACE
    assert [(type(frame.message), frame.id) for frame in frames] == [(Answer, 7), (Backlog, 0), (Answer, 8), (Backlog, 0)]
    assert [frame.message.frames for frame in frames if isinstance(frame.message, Backlog)] == [3, 3]
    assert [frame.message.seconds for frame in frames if isinstance(frame.message, Backlog)] == [SECONDS, 0.0]
    assert house.metrics.channel_writes.values[("engine",)] == [3], "an answer and its report are one write"


def test_however_much_is_asked_at_once_turns_are_launched_meanwhile(house: House) -> None:
    for id in range(3 * FRAMES_PER_BATCH):
        house.frontend.send(encode(request([2]), id, (b"",)))
    house.run()
    assert house.batcher.most_between == FRAMES_PER_BATCH


def test_a_front_that_is_answered_nothing_is_told_nothing(house: House) -> None:
    house.run()
    assert [type(frame.message) for frame in house.to_front] == [EngineStatus]


def test_what_an_engine_counts_says_how_much_work_is_left_in_it(house: House) -> None:
    for id in (1, 2, 3):
        house.frontend.send(encode(request([2]), id, (b"",)))
    house.supervisor.send(encode(CollectMetrics(), 5))
    house.run()
    [counts] = [frame for frame in house.to_supervisor if isinstance(frame.message, MetricsCollected)]
    assert isinstance(counts.message, MetricsCollected)
    [[labels, [seconds]]] = counts.message.snapshot["seqserve_backlog_seconds"]
    assert (counts.id, tuple(labels)) == (5, (str(PLACE),))
    assert seconds in [SECONDS * waiting for waiting in range(4)]


def test_a_front_is_given_the_trace_that_it_asks_for(house: House) -> None:
    house.frontend.send(encode(RecordTrace(batches=5, seconds=0.0), 4))
    house.run()
    traced = next(frame for frame in house.to_front if isinstance(frame.message, Done))
    assert traced.id == 4
    assert msgspec.json.decode(traced.tail)[0]["args"] == {"name": f"engine-{PLACE} cpu"}


def test_a_trace_that_nobody_waits_for_makes_room_for_the_next(house: House) -> None:
    for id in (4, 5, 6):
        house.frontend.send(encode(RecordTrace(batches=5, seconds=0.0 if id == 6 else 60.0), id))
        if id == 4:
            house.frontend.send(encode(Cancel(), id))
    house.run()
    answers = [(type(frame.message), frame.id) for frame in house.to_front if type(frame.message) in (Done, Refusal)]
    assert answers == [(Refusal, 6)]
    assert house.heartbeat.late_seconds() < 0


def test_a_turn_is_not_taken_for_hung_because_a_trace_kept_the_loop(house: House) -> None:
    house.engine.running = time.monotonic() - 100, 0.0
    house.frontend.send(encode(RecordTrace(batches=5, seconds=0.0), 4))
    house.run()
    assert house.heartbeat.late_seconds() < 0


def test_a_turn_that_hangs_is_taken_for_hung(house: House) -> None:
    house.engine.running = time.monotonic() - 100, 0.0
    house.run()
    assert house.heartbeat.late_seconds() > 90
