"""A real server under many clients: replies are correct, and clients that disconnect leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import uvloop
from websockets.asyncio.client import connect

from loadtest.target import Target
from service.supervisor.repository import POLICY
from tests import accumulator, models
from tests.accumulator import CALLERS, REST_SECONDS, SMALL, at_rest, counts, faults_of, rests, tell, watch
from tests.callers import Caller
from tests.planted import constants
from tests.reloading import load
from tests.serving import Server, eventually, serving
from tests.steady import open_files

SEQUENCES = 5
"""Sequences per client. tests/long has 2,000."""
IDLE_SECONDS, ABANDONED = 0.5, 500
WAVE = 400
RELOAD_SECONDS = 0.02
"""Time between two new versions."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with accumulator, slow, an accumulator that limits the engine, sensors, whose sequences are cut, and both, a
    bidirectional model."""
    root = tmp_path_factory.mktemp("models")
    models.accumulator(root)
    models.accumulator(root, "slow", hidden=128)
    models.sensors(root, hidden=64)
    models.sensors(root, "both", bidirectional=True, hidden=64)
    return root


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with few slots and many sessions, which never expire."""
    with serving(folder, tmp_path_factory.mktemp("log"), **SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def busy(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with default settings."""
    with serving(folder, tmp_path_factory.mktemp("log")) as running:
        yield running


# Sums.


def test_sums_are_exact_and_all_requests_are_accounted_for(small: Server) -> None:
    before, moves = at_rest(small), small.metric("seqserve_session_moves_total", to="slot")
    told = tell(small.address, callers=CALLERS, sequences=SEQUENCES)
    print(told)
    assert not told.faults, faults_of(told.faults)
    told.ledger.check(at_rest(small).since(before))
    assert told.ledger.gone > CALLERS * SEQUENCES * accumulator.HANGS_UP / 4, "some hung up"
    assert small.metric("seqserve_session_moves_total", to="slot") > moves + 100, "states came back from the host"
    assert small.metric("seqserve_batch_sequences_sum") > 1.2 * small.metric("seqserve_sequences_total"), "chunks were cut"
    assert max(told.in_flight) > 0, "some were seen on their way"


def test_sums_are_exact_while_versions_are_replaced(tmp_path: Path) -> None:
    """A session keeps its version. The next session under its name has the newest version."""
    root = tmp_path / "models"
    models.accumulator(root)
    (root / "accumulator" / POLICY).write_text('serve = "latest"')
    ended, loaded = threading.Event(), 1

    def reload(server: Server) -> None:
        nonlocal loaded
        while not ended.wait(RELOAD_SECONDS):
            loaded += 1
            shutil.copytree(root / "accumulator" / "1", root / "accumulator" / str(loaded))
            load(server, "accumulator")

    patient = constants({"service.supervisor.reload.UNLOAD_SECONDS": 600})
    with patient, serving(root, tmp_path, **SMALL) as server, ThreadPoolExecutor(1) as thread:
        before = at_rest(server)
        reloading = thread.submit(reload, server)
        try:
            told = tell(server.address, callers=CALLERS // 4, sequences=SEQUENCES)
        finally:
            ended.set()
        reloading.result()
        print(told, f"and {loaded} versions")
        assert not told.faults, faults_of(told.faults)
        assert loaded > 2
        told.ledger.check(at_rest(server).since(before))
        eventually(lambda: len(server.events("unloaded")) == loaded - 1, within_seconds=REST_SECONDS)


# Clients that disconnect.


class Rude(Caller):
    """A client that resets its connection instead of closing it."""

    def hang_up(self) -> None:
        if self._transport is not None:
            own = self._transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        super().hang_up()


def rows(steps: int, seed: int = 0) -> list[list[float]]:
    return np.random.default_rng(seed).normal(size=(steps, 3)).round(2).tolist()  # type: ignore[no-any-return]


def asked(target: Target, model: str, inputs: list[Any], **options: Any) -> bytes:
    return target.request(json.dumps({"model": model, "inputs": inputs, **options}).encode())


async def leave(target: Target, request: bytes, seconds: float, chance: random.Random) -> int:
    """Disconnect after `seconds`. Returns the status of a reply before that, or 0."""
    caller = await chance.choice((Caller, Rude)).connect(target)
    try:
        async with asyncio.timeout(seconds):
            return (await caller.ask(request)).status
    except (TimeoutError, ConnectionError):
        return 0
    finally:
        caller.hang_up()


async def leave_stream(target: Target, seconds: float, chance: random.Random) -> int:
    """Abort a WebSocket with chunks in flight."""
    async with connect(f"ws://{target.host}:{target.port}/stream?model=sensors", proxy=None, open_timeout=60) as stream:
        for _ in range(chance.randint(1, 4)):
            await stream.send(np.zeros((chance.randint(1, 4000), 3), np.float32).tobytes())
        await asyncio.sleep(seconds)
        stream.transport.abort()
    return 0


async def wave(target: Target, requests: Sequence[bytes], chance: random.Random) -> Counter[int]:
    """Send requests whose clients disconnect, and return the statuses of early replies. Scrapes must account for every request."""
    going = []
    for number in range(WAVE):
        seconds = chance.uniform(0.01, 1.5)
        if number % 5 == 0:
            going.append(leave_stream(target, seconds, chance))
            continue
        request = chance.choice(requests)
        # One in four before the body is whole, or even its head.
        cut = chance.choice((chance.randint(1, len(request) - 1), chance.randint(1, 100))) if number % 4 == 0 else len(request)
        going.append(leave(target, request[:cut], seconds, chance))
    in_flight, ended = list[int](), asyncio.Event()
    watching = asyncio.ensure_future(watch(target, in_flight, ended))
    try:
        return Counter(await asyncio.gather(*going))
    finally:
        ended.set()
        await watching
        print("in flight were", in_flight)


def test_disconnected_clients_leave_nothing_behind(busy: Server) -> None:
    target, chance = Target.of(busy.address, "/infer"), random.Random(0)
    # Some race with their deadline, or with their answer.
    options: list[dict[str, Any]] = [{}, {}, {}, {"deadline_ms": 100}, {"deadline_ms": 700}, {"session": "left"}]
    requests = [asked(target, "sensors", [rows(2000 + 200 * seed)], **option) for seed, option in enumerate(options)]
    requests += [asked(target, "accumulator", [[1] * 20_000], **option) for option in options[:-1] * 2]
    requests += [asked(target, "both", [rows(1500)], **option) for option in options[:-1]]
    at_rest(busy)
    files = open_files(busy)
    cancelled = [busy.metric("seqserve_cancelled_total", **{"while": where}) for where in ("waiting", "running")]
    statuses = uvloop.run(wave(target, requests, chance))
    gone = time.monotonic()
    # Only the session with this name outlives its clients.
    eventually(lambda: busy.client.delete("/sessions/left/state") and rests(busy), REST_SECONDS)
    rested = time.monotonic() - gone
    assert statuses.keys() <= {0, 200, 409, 503, 504}, statuses
    start = time.monotonic()
    assert busy.infer("sensors", [rows(3)]).status_code == 200
    print(f"statuses {dict(statuses)}, at rest in {rested:.2f} s, the next answer in {time.monotonic() - start:.3f} s")
    counts(busy).check()
    eventually(lambda: open_files(busy) == files, REST_SECONDS)
    for where, so_far in zip(("waiting", "running"), cancelled, strict=True):
        assert busy.metric("seqserve_cancelled_total", **{"while": where}) > so_far, f"some were {where}"


# Deadlines.

STEPS = 3000
LOAD, LOAD_SECONDS, WARM_SECONDS = 2.0, 1.5, 0.7
MARGIN_SECONDS, LATEST_SECONDS = 0.1, 0.5
"""After its deadline, 99 of 100 requests have a reply within the first and all within the second. Half of the refused requests have it
within the first, and 99 of 100 within the second. On a quiet machine a reply takes a tenth of that."""
LAG_SECONDS = 0.01
"""How long the client's event loop sleeps between two measurements of its lag."""
LAGS = 10
"""How many times the client's worst lag is added to both margins: each process on a request's path waits for a core as the client does."""
DEADLINES_MS = (1.0, 2000.0)


class Heard(NamedTuple):
    """A request: its deadline, the time until the reply, and the outcome."""

    deadline: float
    seconds: float
    code: str

    @property
    def over(self) -> float:
        """Time between the deadline and the reply, negative when in time. A refusal is due at once."""
        return self.seconds - (0.0 if self.code == "overloaded" else self.deadline)


def check_in_time(heard: Sequence[Heard], lag: float = 0.0) -> None:
    """Check that every reply came in time, on a machine that lets a process wait `lag` seconds for a core."""
    margin, latest = MARGIN_SECONDS + LAGS * lag, LATEST_SECONDS + LAGS * lag
    assert {one.code for one in heard} <= {"ok", "deadline_exceeded", "overloaded"}, Counter(one.code for one in heard)
    answered, refused = (sorted(one.over for one in heard if (one.code == "overloaded") == was) for was in (False, True))
    for over, share in ((answered, 0.99), (refused, 0.5)):
        assert not over or quantile(over, share) <= margin, over[-20:]
    for over, share in ((answered, 1.0), (refused, 0.99)):
        assert not over or quantile(over, share) <= latest, over[-20:]


def quantile(rising: Sequence[float], share: float) -> float:
    return rising[min(len(rising) - 1, math.ceil(share * len(rising)))]


class Crowd:
    """Clients on as many connections as they need."""

    def __init__(self, target: Target, model: str = "slow", steps: int = STEPS) -> None:
        self._target = target
        self._idle: list[Caller] = []
        self._model = model
        self._body = json.dumps([1] * steps)
        self.heard: list[Heard] = []
        self.lag = 0.0

    async def measure_lag(self) -> None:
        """Keep the longest time by which this event loop woke up late."""
        while True:
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.lag = max(self.lag, time.monotonic() - due)

    async def ask(self, deadline_ms: float) -> None:
        body = f'{{"model": "{self._model}", "inputs": [{self._body}], "deadline_ms": {deadline_ms}}}'
        caller = self._idle.pop() if self._idle else await Caller.connect(self._target)
        start = time.monotonic()
        reply = await caller.ask(self._target.request(body.encode()))
        seconds = time.monotonic() - start
        self._idle.append(caller)
        code = "ok" if reply.status == 200 else json.loads(reply.body)["code"]
        self.heard.append(Heard(deadline_ms / 1000, seconds, code))

    async def capacity(self, callers: int) -> float:
        """Return the replies per second of clients with long deadlines."""

        async def keep_asking() -> None:
            while time.monotonic() < end:
                await self.ask(60_000)

        start = time.monotonic()
        end = start + WARM_SECONDS
        await asyncio.gather(*[keep_asking() for _ in range(callers)])
        answered, self.heard = len(self.heard), []
        return answered / (time.monotonic() - start)

    async def come(self, rate: float, seconds: float, chance: random.Random) -> None:
        """Send requests at a rate, without waiting for replies."""
        at = start = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as coming:
            while at < start + seconds:
                at += chance.expovariate(rate)
                await asyncio.sleep(at - asyncio.get_running_loop().time())
                coming.create_task(self.ask(chance.uniform(*DEADLINES_MS)))

    def close(self) -> None:
        for caller in self._idle:
            caller.hang_up()


async def overloaded(crowd: Crowd, seconds: float) -> float:
    """Send LOAD times as many requests as are answered, and return the capacity."""
    try:
        capacity = await crowd.capacity(128)
        measuring = asyncio.ensure_future(crowd.measure_lag())
        await crowd.come(LOAD * capacity, seconds, random.Random(0))
        measuring.cancel()
        return capacity
    finally:
        crowd.close()
