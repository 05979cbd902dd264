"""The processor time of an engine process for a request besides the model: channel, queue, staging and answers.

A client in another process sends blocks of requests, and the next blocks after all answers. The engine's own loop handles them. For a
CPU: on a GPU the loop also uses the time in which it waits for the device.
"""

from __future__ import annotations

import multiprocessing
import selectors
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from kernels.bench import questions
from service.engine.build import build_batcher
from service.engine.execution.device_engine import DeviceEngine, PreparedModel
from service.engine.execution.in_flight import InFlightBatch
from service.engine.internal_errors import InternalErrors
from service.engine.loading import ModelLoader
from service.engine.trials import Trials
from service.engine.worker import Worker
from service.ipc.blocks import BlockKey, Buffer, encode_block
from service.ipc.channel import Channel, encode, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages import AnswerBlock, Attach, ModelKey, Request, Returns
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings

BLOCKS = ((1, 1), (1, 8), (1, 32), (8, 4), (8, 8), (1, 64), (64, 1), (8, 64), (64, 8), (512, 1))
"""Numbers of blocks that arrive together, and of requests in each. The last three fill several batches."""
NO_DEADLINE = 1e9
FORK = multiprocessing.get_context("fork")
"""The client inherits its end of the channel."""
WARM_UP = 5
"""Batches that are not counted."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Processor time in microseconds, of a request and of a batch, when `blocks` blocks of `requests` requests arrive together."""

    blocks: int
    requests: int
    request_us: float
    batch_us: float


@dataclass(slots=True)
class _Question:
    """A request that waits for its block, as `QueuedRequest` describes it."""

    id: int
    request: Request
    data: Buffer


def host_time(engine: DeviceEngine, model: str, blocks: int, requests: int, seconds: float) -> HostTime:
    """Measure for some seconds. A request has one question of token ids."""
    times, rows = list[float](), list[int]()
    before = time.thread_time()

    def watch(in_flight: InFlightBatch, ended: float) -> None:
        nonlocal before
        now = time.thread_time()
        times.append(now - before - (in_flight.launched - in_flight.staged))
        rows.append(in_flight.batch.rows)
        before = now

    engine.watch(watch)
    supervisor, client, worker = _started(engine)
    frames = [_frame(model, requests, seed) for seed in range(blocks)]
    sending = FORK.Process(target=_send, args=(client, frames, blocks * requests, seconds))
    sending.start()
    client.close()
    ending = threading.Thread(target=_close_after, args=(sending, supervisor))
    ending.start()
    worker.run()
    ending.join()
    engine.watch(None)
    batch_us = 1e6 * statistics.median(times[WARM_UP:] or times)
    return HostTime(blocks, requests, round(batch_us / statistics.median(rows), 3), round(batch_us, 2))


def _started(engine: DeviceEngine) -> tuple[Channel, Channel, Worker]:
    """Return the supervisor's end of the control channel, the end of a frontend, and the engine's loop, which has not begun."""
    (near, far), (client, attached) = pair(), pair()
    metrics, log = Metrics(), Log("engine")
    errors = InternalErrors(log, metrics)
    batcher = build_batcher(Settings(), engine, metrics, errors)
    models, control = ModelLoader(engine, batcher, _no_model, log), Channel(far)
    worker = Worker(control, Heartbeat(), batcher, engine, models, Trials(control), 0, metrics, errors)
    supervisor = Channel(near)
    supervisor.send(encode(Attach()), attached)
    supervisor.flush()
    attached.close()
    return supervisor, Channel(client), worker


def _no_model(*_: object) -> PreparedModel:
    raise AssertionError("no model is loaded meanwhile")


def _frame(model: str, requests: int, seed: int) -> bytes:
    """Return the frame of a block, as a frontend sends it."""
    now = time.monotonic()
    queued = [
        _Question(id, Request(model, "1", [steps], NO_DEADLINE, now), bytes(4 * steps))
        for id, steps in enumerate(questions.lengths(requests, seed), 1)
    ]
    return encode_block(BlockKey(ModelKey(model, "1"), 0, Returns()), queued)[0]


def _close_after(sending: BaseProcess, supervisor: Channel) -> None:
    """End the engine's loop when the client has ended."""
    sending.join()
    supervisor.close()


def _send(client: Channel, frames: Sequence[bytes], requests: int, seconds: float) -> None:
    """Send the frames again after each answer to all of them."""
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        while time.monotonic() < until and client.open:
            for frame in frames:
                client.send(frame)
            client.flush()
            answered = 0
            while answered < requests and client.open:
                selector.select()
                answered += sum(frame.message.requests for frame in client.receive() if isinstance(frame.message, AnswerBlock))
