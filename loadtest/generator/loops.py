"""The closed loop, the open loop, and streams in real time."""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import cycle

from msgspec import structs

from loadtest.generator import grpc, websocket
from loadtest.generator.arrivals import ARRIVALS, staggered
from loadtest.generator.connection import CLOSED, OK, Connection, OpenRequest
from loadtest.generator.grpc import GrpcConnection
from loadtest.generator.http import HttpConnection
from loadtest.generator.job import Job, Result
from loadtest.generator.readers import READERS, STREAM_TOLERANCE, TOLERANCE, agree, refusal
from loadtest.generator.timer import Timer
from loadtest.generator.websocket import WebSocketConnection

RETRY_SECONDS = 0.1
MAX_KNOWN = 64
"""Remembered right answers of one request. They differ in the last digits, because a row's rounding depends on its batch."""
WRONG = "wrong answer"
UNANSWERED, ENDED = "unanswered", "not sent, because the stream has failed"
OPENING = 50
"""Most streams of a generator whose first chunks are not answered yet."""


async def run(job: Job) -> Result:
    """Run a job in this process."""
    load = (RealTimeLoop if job.period else OpenLoop if job.rate else ClosedLoop)(job)
    await load.connect()
    load.start()
    await asyncio.sleep(job.warm_up)
    load.begin()
    await asyncio.sleep(job.seconds)
    load.end()
    await load.drain()
    return load.result()


class Load:
    """Connections, and the figures of their requests since `begin`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._new_connection = _connection_factory(self, job)
        self._tls = ssl.create_default_context(cafile=job.ca or None) if job.tls else None
        self._connections: set[Connection] = set()
        self._numbers = cycle(range(len(job.requests)))
        self._answers = AnswerCheck(job)
        self._pids = [clock_of(pid) for pid in job.pids]
        self._retries: set[asyncio.Task[None]] = set()
        self._reset()

    def _reset(self) -> None:
        self._latencies = array("d")
        self._failures: Counter[str] = Counter()
        self._due = self._right = 0

    async def connect(self) -> None:
        await asyncio.gather(*(self._connect() for _ in range(self._job.callers)))

    async def _connect(self) -> Connection:
        loop, job = asyncio.get_running_loop(), self._job
        _, connection = await loop.create_connection(self._new_connection, job.host, job.port, ssl=self._tls)
        self._connections.add(connection)
        return connection

    def start(self) -> None:
        """Send the first requests."""
        raise NotImplementedError

    def begin(self) -> None:
        """Count from now on."""
        self._reset()
        self._start, self._clocks = time.monotonic(), self._read_clocks()

    def end(self) -> None:
        """Send no more requests."""
        clocks, self._seconds = self._read_clocks(), time.monotonic() - self._start
        self._cpu_seconds, *self._server_cpu_seconds = (b - a for a, b in zip(self._clocks, clocks, strict=True))
        self._answered = self._right

    def _read_clocks(self) -> list[float]:
        return [time.process_time(), *map(time.clock_gettime, self._pids)]

    async def drain(self) -> None:
        """Wait for the open requests for a while, then close all connections."""
        deadline = time.monotonic() + self._job.grace
        while self._open() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in self._connections:
            connection.hang_up()
        for retry in self._retries:
            retry.cancel()

    def _open(self) -> int:
        """Return the number of requests without an answer."""
        return sum(len(connection.open) for connection in self._connections)

    def answered(self, connection: Connection, status: int, body: bytes) -> None:
        raise NotImplementedError

    def broken(self, connection: Connection, reason: str) -> None:
        """Count a failure for each open request, and one for anything but the end of an idle connection. Connect again after a pause."""
        if count := len(connection.open) or reason != CLOSED:
            self._failures[reason] += count
        self._connections.discard(connection)
        retry = asyncio.ensure_future(self._replace())
        self._retries.add(retry)
        retry.add_done_callback(self._retries.discard)

    async def _replace(self) -> None:
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                return self._resume(await self._connect())
            except OSError as error:
                self._failures[type(error).__name__] += 1

    def _resume(self, connection: Connection) -> None:
        """Use a new connection."""
        raise NotImplementedError

    def result(self) -> Result:
        return Result(
            self._seconds,
            self._due,
            self._answered,
            self._latencies.tobytes(),
            dict(self._failures),
            self._cpu_seconds,
            self._server_cpu_seconds,
        )


class ClosedLoop(Load):
    """Callers that send their next request after an answer."""

    _ended = False

    def start(self) -> None:
        for connection in list(self._connections):
            self._resume(connection)

    def end(self) -> None:
        super().end()
        self._ended = True

    def answered(self, connection: Connection, status: int, body: bytes) -> None:
        now = time.monotonic()
        number, since = connection.open.popleft()
        if self._ended:
            return
        reason = self._answers.fault(number, status, body)
        if reason is None:
            self._right += 1
            self._latencies.append(now - since)
        else:
            self._failures[reason] += 1
        connection.ask(next(self._numbers), now)

    def _resume(self, connection: Connection) -> None:
        for _ in range(0 if self._ended else self._job.in_flight):
            connection.ask(next(self._numbers), time.monotonic())

    async def drain(self) -> None:
        await super().drain()
        if unanswered := self._open():
            self._failures[UNANSWERED] += unanswered


class OpenLoop(Load):
    """Arrivals that do not wait for answers. A latency counts from the time when its request was due.

    A request that finds no idle connection waits for one, and its latency grows meanwhile.
    """

    _counted_since = float("inf")

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._gaps = ARRIVALS[job.arrivals](job.rate, job.seed)
        self._idle: deque[Connection] = deque()
        self._waiting: deque[float] = deque()

    def start(self) -> None:
        self._idle.extend(self._connections)
        self._timer = Timer(self._arrive)
        self._next = time.monotonic() + next(self._gaps)
        self._timer.set(self._next)

    def begin(self) -> None:
        super().begin()
        self._counted_since = self._start

    def end(self) -> None:
        super().end()
        self._timer.close()

    def _arrive(self) -> None:
        """Send the requests that are due."""
        now = time.monotonic()
        while self._next <= now:
            self._due += self._next >= self._counted_since
            self._send(self._next)
            self._next += next(self._gaps)
        self._timer.set(self._next)

    def _send(self, moment: float) -> None:
        """Send a request that is due since `moment`, or let it wait."""
        if self._idle:
            self._idle.popleft().ask(next(self._numbers), moment)
        else:
            self._waiting.append(moment)

    def answered(self, connection: Connection, status: int, body: bytes) -> None:
        now = time.monotonic()
        number, since = connection.open.popleft()
        reason = self._answers.fault(number, status, body)
        if reason is not None:
            self._fail(connection, reason, since)
        else:
            self._right += 1
            if since >= self._counted_since:
                self._latencies.append(now - since)
        self._resume(connection)

    def _fail(self, connection: Connection, reason: str, since: float) -> None:
        self._failures[reason] += 1

    def _resume(self, connection: Connection) -> None:
        """Send the next request that waits, or note that the connection is idle."""
        if self._waiting:
            connection.ask(next(self._numbers), self._waiting.popleft())
        else:
            self._idle.append(connection)

    def _open(self) -> int:
        return super()._open() + len(self._waiting)

    def broken(self, connection: Connection, reason: str) -> None:
        if not connection.open:
            self._idle.remove(connection)
        super().broken(connection, reason)


class RealTimeLoop(OpenLoop):
    """Streams that send a chunk in every period, whether the chunk before it is answered or not. They open before any chunk is counted.

    A refused chunk leaves a gap in its stream, so a stream with a failure ends, and its later chunks fail too.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._gaps = staggered(job.callers, job.period, job.seed)
        self._streams: list[tuple[Connection, Iterator[int]]] = []
        self._delays = array("d")

    async def connect(self) -> None:
        """Open the streams with their first chunks, some at a time. Raises OSError when one is refused."""
        for place in range(self._job.callers):
            connection = await self._connect()
            first = place * self._job.chunks % len(self._job.requests)
            self._streams.append((connection, iter(range(first + 1, first + self._job.chunks))))
            connection.ask(first, time.monotonic())
            await self._opened(place + 1 - OPENING)
        await self._opened(self._job.callers)

    async def _opened(self, count: int) -> None:
        """Wait for the first answers to so many streams."""
        while self._right < count:
            if self._failures:
                raise ConnectionError(f"after {self._right} open streams another was refused: {', '.join(self._failures)}")
            await asyncio.sleep(0.001)

    def start(self) -> None:
        self._turns = cycle(self._streams)
        super().start()

    def _send(self, moment: float) -> None:
        connection, numbers = next(self._turns)
        counted = moment >= self._counted_since
        if connection in self._connections and (number := next(numbers, None)) is not None:
            connection.ask(number, moment)
        else:
            self._failures[ENDED] += counted
        if counted:
            self._delays.append(time.monotonic() - moment)

    def _resume(self, connection: Connection) -> None:
        """Nothing waits for an idle connection."""

    def _fail(self, connection: Connection, reason: str, since: float) -> None:
        connection.hang_up()
        connection.open.appendleft(OpenRequest(0, since))
        self.broken(connection, reason)

    def broken(self, connection: Connection, reason: str) -> None:
        self._failures[reason] += sum(since >= self._counted_since for _, since in connection.open)
        connection.open.clear()
        self._connections.discard(connection)

    def result(self) -> Result:
        return structs.replace(super().result(), delays=self._delays.tobytes())


class AnswerCheck:
    """Compares answers with the expected scores. An answer that was right before is recognised by its bytes."""

    def __init__(self, job: Job) -> None:
        self._known: list[set[bytes]] = [set() for _ in job.requests]
        self._expected = job.expected
        self._read = READERS[job.reader]
        self._tolerance = STREAM_TOLERANCE if job.period else TOLERANCE

    def fault(self, number: int, status: int, body: bytes) -> str | None:
        """Return why an answer does not count, or None for a right answer."""
        if status != OK:
            return f"status {refusal(status, body)}"
        return None if body in self._known[number] or self._is_right(number, body) else WRONG

    def _is_right(self, number: int, body: bytes) -> bool:
        expected = self._expected[number]
        try:
            right = agree(self._read(body, expected), expected, self._tolerance)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            right = False
        if right and len(self._known[number]) < MAX_KNOWN:
            self._known[number].add(body)
        return right


def _connection_factory(load: Load, job: Job) -> Callable[[], Connection]:
    if job.transport == "http":
        return lambda: HttpConnection(load, job.requests)
    authority = f"{job.host}:{job.port}"
    if job.transport == "websocket":
        handshake = websocket.handshake(authority, job.path, job.headers)
        return lambda: WebSocketConnection(load, job.requests, handshake)
    frames = grpc.prepare(job.requests, authority, job.path)
    return lambda: GrpcConnection(load, frames)


def clock_of(pid: int) -> int:
    """Return the clock of a process's processor time; Linux encodes the process in the clock's number."""
    return (~pid << 3) | 2
