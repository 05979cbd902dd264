"""The loop of the engine process. The test plays the supervisor and a frontend."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from service.engine import worker
from service.engine.batching.request_block import QueuedBlock
from service.engine.execution.graph_capture import RunBetweenBatches
from service.engine.execution.in_flight import BlockResult
from service.engine.execution.served_models import PreparedModel
from service.engine.frontend_channel import FrontendChannel
from service.engine.internal_errors import InternalErrors
from service.engine.known_answers import KnownAnswers
from service.engine.loading import ModelLoader
from service.engine.trials import TrialReports
from service.engine.worker import Worker
from service.errors import SERVICE_FAILED
from service.ipc.blocks import ID, packed_key
from service.ipc.channel import Channel, Frame, encode, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.control import Attach, CollectMetrics, MetricsCollected
from service.ipc.messages.inference import (
    FEATURES,
    AnswerBlock,
    Backlog,
    BlockKey,
    Cancel,
    EngineStatus,
    RecordTrace,
    RefusalBlock,
    RequestBlock,
)
from service.ipc.messages.message import Done, Refusal
from service.ipc.messages.models import ModelKey, ModelVersion
from service.ipc.messages.sessions import ExportSession
from service.log import Log
from service.metrics import Metrics
from tests.engine.batching.harness import MODEL, NEVER, PLAIN, FakeEngine, block

PLACE = 3
SECONDS = 2.5
"""Predicted seconds of each waiting request."""
BATCH_SEQUENCES = 8
SOON = 1e9
"""A moment that no requests have waited for, however slow the machine is."""
BATCHES = 6
"""Batches per test. Then the frontend closes its channel, and one batch later the supervisor closes the control channel."""


class WorkerHarness:
    """A worker with one frontend. Keeps the frames that the worker sends to both.

    Its batcher answers one block per batch. It raises `raised` for the requests of frontends. most_between: the most requests that were
    submitted between two batches.
    """

    def __init__(self) -> None:
        near, far = pair()
        self.supervisor, self._control = Channel(near), Channel(far)
        self.frontend, self.heartbeat, self.metrics = self._attached(), Heartbeat(), Metrics()
        self.engine = FakeEngine()
        self.engine.served = [MODEL]
        self.to_frontend: list[Frame] = []
        self.to_supervisor: list[Frame] = []
        self.raised: Exception | None = None
        self._blocks: list[QueuedBlock] = []
        self.batches = self.since = self.most_between = 0
        batcher: Any = SimpleNamespace(
            waiting=1,
            idle=False,
            batch_sequences=BATCH_SEQUENCES,
            count=lambda: None,
            backlog_seconds=lambda: SECONDS * len(self._blocks),
            submit=self._submit,
            cancel=self._cancel,
            cancel_owner=lambda *_: None,
            watch=lambda *_: None,
            step=self.step,
            sessions=None,
        )
        self.batcher = batcher
        models = ModelLoader(self.engine, batcher, self._prepared, Log("worker"))
        errors, trials = InternalErrors(Log("worker"), self.metrics), TrialReports(self._control)
        self.worker = Worker(self._control, self.heartbeat, batcher, self.engine, models, trials, PLACE, self.metrics, errors)

    def run(self) -> None:
        self.supervisor.flush()
        self.frontend.flush()
        self.worker.run()

    def close(self) -> None:
        for channel in (self.supervisor, self._control, self.frontend):
            channel.close()
        self.heartbeat.close()

    def _prepared(self, model_version: ModelVersion, between_batches: RunBetweenBatches) -> PreparedModel:
        raise AssertionError("nothing is loaded")

    def _attached(self) -> Channel:
        near, far = pair()
        self.supervisor.send(encode(Attach()), attached=far)
        far.close()
        return Channel(near)

    def _submit(self, block: QueuedBlock) -> None:
        if self.raised is not None:
            raise self.raised
        self._blocks.append(block)
        self.since += block.requests
        self.most_between = max(self.most_between, self.since)

    def _cancel(self, owner: FrontendChannel, id: int) -> None:
        if self.raised is not None:
            raise self.raised
        self._blocks = [block for block in self._blocks if block.owner is not owner or block.ids != [id]]

    def step(self, before_launch: object = None) -> bool:
        self.since = 0
        if self._blocks:
            block = self._blocks.pop(0)
            scores = np.zeros((block.sequences, 1), FEATURES)
            block.owner.answer(block, BlockResult(scores, None, None, None, block.columns.lengths), 0.0)
        self.batches += 1
        self.to_supervisor += self.supervisor.receive()
        if self.batches == BATCHES:
            self.to_frontend = self.frontend.receive()
            self.frontend.close()
        elif self.batches == BATCHES + 1:
            self.supervisor.close()
        return True


@pytest.fixture
def harness() -> Iterator[WorkerHarness]:
    made = WorkerHarness()
    yield made
    made.close()


def requests(*ids: int, sent: float = SOON) -> bytes:
    """Return a block of requests of one step each. sent: a moment of time.monotonic."""
    count = len(ids)
    message = RequestBlock(packed_key(BlockKey(MODEL, 0, PLAIN)), count, count, count, 1, 1, NEVER, sent)
    return encode(message, 0, msgspec.structs.astuple(block([(id, NEVER, [1]) for id in ids]).columns))


def test_answers_carry_the_backlog_and_the_frames_it_counts(harness: WorkerHarness) -> None:
    for id in (6, 7):
        harness.frontend.send(requests(id))
        harness.frontend.send(encode(Cancel(), 6))
    harness.frontend.send(requests(8, 9))
    harness.run()
    status, *frames = harness.to_frontend
    assert isinstance(status.message, EngineStatus) and status.message.place == PLACE
    assert [type(frame.message) for frame in frames] == [AnswerBlock, Backlog, AnswerBlock, Backlog]
    assert [np.frombuffer(frame.tail, ID, count).tolist() for frame, count in ((frames[0], 1), (frames[2], 2))] == [[7], [8, 9]]
    assert [frame.message.frames for frame in frames if isinstance(frame.message, Backlog)] == [5, 5]
    assert [frame.message.seconds for frame in frames if isinstance(frame.message, Backlog)] == [SECONDS, 0.0]
    assert harness.metrics.channel_writes.values[("engine",)] == [3], "an answer and its report are one write"


def test_batches_are_launched_between_many_requests(harness: WorkerHarness) -> None:
    """Requests of a block count each."""
    for id in range(3 * BATCH_SEQUENCES):
        harness.frontend.send(requests(id, 100 + id))
    harness.run()
    assert harness.most_between == BATCH_SEQUENCES


def test_requests_that_waited_long_are_read_before_the_next_batch(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are not in the queue are neither predicted nor refused."""
    monkeypatch.setattr(worker, "MOST_READ", 2 * BATCH_SEQUENCES)
    for id in range(3 * BATCH_SEQUENCES):
        harness.frontend.send(requests(id, sent=0.0))
    harness.run()
    assert harness.most_between == 2 * BATCH_SEQUENCES


def test_unexpected_exception_refuses_its_requests_and_nothing_else(
    harness: WorkerHarness, capfd: pytest.CaptureFixture[str]
) -> None:
    harness.raised = IndexError("secret")
    harness.frontend.send(requests(11, 12))
    harness.frontend.send(encode(Cancel(), 13))
    harness.frontend.send(encode(ExportSession("a"), 14))
    harness.run()
    [of_call] = [frame for frame in harness.to_frontend if isinstance(frame.message, Refusal)]
    [of_block] = [frame for frame in harness.to_frontend if isinstance(frame.message, RefusalBlock)]
    assert isinstance(of_call.message, Refusal) and isinstance(of_block.message, RefusalBlock)
    assert of_call.id == 14 and np.frombuffer(of_block.tail, ID).tolist() == [11, 12]
    refusals = [of_call.message, of_block.message.refusal]
    assert {(refusal.code, refusal.message) for refusal in refusals} == {("inference_failed", SERVICE_FAILED)}
    counts = {work: values for (work,), [values] in harness.metrics.engine_errors.values.items()}
    assert counts == {"requests": 1, "cancel": 1, "session_call": 1}
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(entry["event"], entry["work"]) for entry in logged] == [
        ("bug", work) for work in ("requests", "cancel", "session_call")
    ]
    assert logged[0]["error"] == "IndexError: secret"


def test_metrics_include_the_backlog(harness: WorkerHarness) -> None:
    for id in (1, 2, 3):
        harness.frontend.send(requests(id))
    harness.supervisor.send(encode(CollectMetrics(), 5))
    harness.run()
    [counts] = [frame for frame in harness.to_supervisor if isinstance(frame.message, MetricsCollected)]
    assert isinstance(counts.message, MetricsCollected)
    [[labels, [seconds]]] = counts.message.snapshot["seqserve_backlog_seconds"]
    assert (counts.id, tuple(labels)) == (5, (str(PLACE),))
    assert seconds in [SECONDS * waiting for waiting in range(4)]


def test_supervisor_receives_what_its_socket_does_not_accept_at_once(harness: WorkerHarness) -> None:
    """Such as the metrics of hundreds of models."""
    for number in range(20_000):
        harness.metrics.tokens.add(str(number), "1")
    harness.supervisor.send(encode(CollectMetrics(), 5))
    harness.run()
    [snapshot] = [frame.message.snapshot for frame in harness.to_supervisor if isinstance(frame.message, MetricsCollected)]
    assert len(snapshot["seqserve_tokens"]) == 20_000


def test_known_answer_is_checked_although_requests_keep_coming(harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request wakes the idle loop, and its batch still runs when the loop ends its turn."""
    harness.batcher.idle, checked = True, list[ModelKey]()
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(KnownAnswers, "next_model", lambda _: MODEL)
    monkeypatch.setattr(KnownAnswers, "check", lambda _, key: checked.append(key))

    def step(before_launch: object) -> None:
        harness.engine.running = None if harness.engine.running else (time.monotonic(), 0.0)
        harness.step()

    monkeypatch.setattr(harness.batcher, "step", step)
    harness.run()
    assert checked == [MODEL]


@pytest.mark.parametrize("traced", [False, True])
def test_hung_batch_misses_the_heartbeat(harness: WorkerHarness, traced: bool) -> None:
    """Recording a trace is no hang. Its frontend gets it."""
    harness.engine.running = time.monotonic() - 100, 0.0
    if traced:
        harness.frontend.send(encode(RecordTrace(batches=5, seconds=0.0), 4))
    harness.run()
    assert (harness.heartbeat.late_seconds() < 0) == traced and (traced or harness.heartbeat.late_seconds() > 90)
    events = {frame.id: msgspec.json.decode(frame.tail) for frame in harness.to_frontend if isinstance(frame.message, Done)}
    assert {id: first["args"] for id, [first, *_] in events.items()} == ({4: {"name": f"engine-{PLACE} cpu"}} if traced else {})
