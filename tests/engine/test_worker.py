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
from service.engine.batching.ticket import SendAnswer, SendRefusal, Ticket

from service.engine import worker
from service.engine.execution.graph_capture import RunBetweenBatches
from service.engine.execution.served_models import PreparedModel
from service.engine.internal_errors import InternalErrors
from service.engine.known_answers import KnownAnswers
from service.engine.loading import ModelLoader
from service.engine.trials import TrialReports
from service.engine.worker import Worker
from service.errors import SERVICE_FAILED
from service.ipc.blocks import ID
from service.ipc.channel import Channel, Frame, encode, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.control import Attach, CollectMetrics, MetricsCollected
from service.ipc.messages.inference import (
    Answer,
    Backlog,
    Cancel,
    EngineStatus,
    RecordTrace,
    RefusalBlock,
    Request,
    RequestBlock,
)
from service.ipc.messages.message import Done, Refusal
from service.ipc.messages.models import ModelKey, ModelVersion
from service.ipc.messages.sessions import ExportSession
from service.log import Log
from service.metrics import Metrics
from tests.engine.batching import harness as fakes
from tests.engine.batching.harness import MODEL, NEVER, PLAIN, FakeEngine, request

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

    Its batcher answers one request per batch. It raises `raised` for the requests of frontends. most_between: the most requests that were
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
        self._replies: list[SendAnswer] = []
        self.batches = self.since = self.most_between = 0
        batcher: Any = SimpleNamespace(
            waiting=1,
            idle=False,
            batch_sequences=BATCH_SEQUENCES,
            count=lambda: None,
            backlog_seconds=lambda: SECONDS * len(self._replies),
            submit=self._submit,
            submit_block=lambda block: self._count(block.requests),
            fail_requests=lambda owner, ids, error: owner.refuse(ids, error),
            cancel=lambda *_: self._replies.clear(),
            cancel_owner=lambda *_: None,
            cancel_request=lambda *_: self._count(0),
            watch=lambda *_: None,
            step=self.step,
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

    def _submit(self, request: Request, data: bytes, reply: SendAnswer, refuse: SendRefusal, *, again: bool = False) -> Ticket:
        self._count(1)
        self._replies.append(reply)
        return Ticket(request, reply, refuse)

    def _count(self, requests: int) -> None:
        if self.raised is not None:
            raise self.raised
        self.since += requests
        self.most_between = max(self.most_between, self.since)

    def step(self, before_launch: object = None) -> bool:
        self.since = 0
        if self._replies:
            self._replies.pop(0)(Answer((1, 1)), [b"1234"])
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


def test_answers_carry_the_backlog_and_the_frames_it_counts(harness: WorkerHarness) -> None:
    harness.frontend.send(encode(request([2]), 7, (b"",)))
    harness.frontend.send(encode(Cancel(), 6))
    harness.frontend.send(encode(request([2]), 8, (b"",)))
    harness.run()
    status, *frames = harness.to_frontend
    assert isinstance(status.message, EngineStatus) and status.message.place == PLACE
    assert [(type(frame.message), frame.id) for frame in frames] == [(Answer, 7), (Backlog, 0), (Answer, 8), (Backlog, 0)]
    assert [frame.message.frames for frame in frames if isinstance(frame.message, Backlog)] == [3, 3]
    assert [frame.message.seconds for frame in frames if isinstance(frame.message, Backlog)] == [SECONDS, 0.0]
    assert harness.metrics.channel_writes.values[("engine",)] == [3], "an answer and its report are one write"


def sent(moment: float) -> Request:
    """Return a request that a frontend sent at this moment of time.monotonic."""
    return msgspec.structs.replace(request([2]), sent=moment)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_batches_are_launched_between_many_requests(harness: WorkerHarness, in_blocks: bool) -> None:
    """Requests of a block count each."""
    for id in range(3 * BATCH_SEQUENCES):
        columns = fakes.block([(id, NEVER, [1]), (100 + id, NEVER, [1])]).columns
        block = encode(RequestBlock(*MODEL, 2, 2, 2, 1, 1, NEVER, SOON, 0, PLAIN), 0, columns)
        harness.frontend.send(block if in_blocks else encode(sent(SOON), id, (b"",)))
    harness.run()
    assert harness.most_between == BATCH_SEQUENCES


def test_requests_that_waited_long_are_read_before_the_next_batch(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are not in the queue are neither predicted nor refused."""
    monkeypatch.setattr(worker, "MOST_READ", 2 * BATCH_SEQUENCES)
    for id in range(3 * BATCH_SEQUENCES):
        harness.frontend.send(encode(sent(0.0), id, (b"",)))
    harness.run()
    assert harness.most_between == 2 * BATCH_SEQUENCES


def test_unexpected_exception_refuses_its_requests_and_nothing_else(
    harness: WorkerHarness, capfd: pytest.CaptureFixture[str]
) -> None:
    columns = fakes.block([(11, NEVER, [1]), (12, NEVER, [1, 1])]).columns
    block = RequestBlock(*MODEL, 2, 3, 3, 1, 1, NEVER, 0.0, 0, PLAIN)
    harness.raised = IndexError("secret")
    harness.frontend.send(encode(request([2]), 10, (b"",)))
    harness.frontend.send(encode(block, 0, columns))
    harness.frontend.send(encode(Cancel(), 13))
    harness.frontend.send(encode(ExportSession("a"), 14))
    harness.run()
    refused = {frame.id: frame.message for frame in harness.to_frontend if isinstance(frame.message, Refusal)}
    [of_block] = [frame for frame in harness.to_frontend if isinstance(frame.message, RefusalBlock)]
    assert isinstance(of_block.message, RefusalBlock)
    assert list(refused) == [10, 14]
    assert np.frombuffer(of_block.tail, ID).tolist() == [11, 12]
    refusals = [*refused.values(), of_block.message.refusal]
    assert {(refusal.code, refusal.message) for refusal in refusals} == {("inference_failed", SERVICE_FAILED)}
    counts = {work: values for (work,), [values] in harness.metrics.engine_errors.values.items()}
    assert counts == {"requests": 2, "cancel": 1, "session_call": 1}
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(entry["event"], entry["work"]) for entry in logged] == [
        ("bug", work) for work in ("requests", "cancel", "session_call")
    ]
    assert logged[0]["error"] == "IndexError: secret"


def test_metrics_include_the_backlog(harness: WorkerHarness) -> None:
    for id in (1, 2, 3):
        harness.frontend.send(encode(request([2]), id, (b"",)))
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
