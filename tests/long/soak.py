"""Mixed load with one fault in each cycle, and an account of every request: `python -m tests.long.soak --hours 8`.

In each cycle clients send requests over HTTP and gRPC, chunks of sessions, and chunks over WebSockets, while one fault happens. Then the
clients finish, the server must come to rest, and the memory, the descriptors and the threads of each process are sampled.

Every answer is known beforehand (tests/accumulator.py). A request is answered once, refused once, or cut off. It may be refused or cut
off only where the fault of its cycle explains it; see EXCUSED.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import uvloop
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from loadtest import oip_requests
from loadtest.target import Target
from service.ipc.messages import IDS
from tests import models
from tests.accumulator import Account, Counts
from tests.callers import Caller, GrpcCaller, Response
from tests.long.full_disk import full_disk
from tests.reloading import load
from tests.serving import Server, eventually, serving
from tests.steady import processes, resident_bytes

KINDS = ("http", "grpc", "session", "stream")
CALLERS = {"http": 6, "grpc": 4, "session": 4, "stream": 2}
FLAGS = ("--device", "cpu,cpu", "--frontends", "2")
"""Two processes of each role, so that one answers while the other is replaced."""
MOST_STEPS, CHUNKS = 20, 4
PATIENCE_SECONDS = 60.0
"""How long a client waits. An answer that takes longer is lost."""
FULL_SECONDS = 2.0
HANG_UPS = 20
CYCLE_SECONDS = 60.0
LOST_SESSION = {"engine_lost", "session_lost", "unknown_session", "session_conflict", "session_unreachable", "UNAVAILABLE"}
CUT = "cut"
EXCUSED: dict[str, dict[str, set[str]]] = {
    "nothing": {},
    "reload": {},
    "hang up": {},
    "full disk": {},
    "kill engine": {"session": LOST_SESSION, "stream": LOST_SESSION | {CUT}},
    "stop engine": {"session": LOST_SESSION, "stream": LOST_SESSION | {CUT}},
    "kill frontend": {kind: {CUT, "UNAVAILABLE"} for kind in KINDS},
    "stop frontend": {kind: {CUT, "UNAVAILABLE"} for kind in KINDS},
}
"""The ends without an answer that a fault explains, by kind of request. Requests without a session are answered even then."""
FAULTS = tuple(EXCUSED)
CONFIDENCE = 0.99
MIN_SAMPLES = 4
"""Samples of one process before its slope means anything."""
LIMITS = {"bytes": 30.0, "descriptors": 1e-4, "threads": 1e-4}
"""What a process may gain with each request. The whole interval of confidence of a leak lies above it."""


# The account of all requests.


@dataclass
class Ledger:
    """The ends of all requests by kind, and all faults."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    sent: int = 0

    def end(self, kind: str, outcome: str) -> None:
        """Count the only end of a request: ok, CUT, or the code of a refusal."""
        self.ends[kind, outcome] += 1

    def wrong(self, fault: str) -> None:
        self.faults.append(fault)

    def unexplained(self, fault: str) -> list[str]:
        """Return the faults found after a cycle with this fault."""
        excused = EXCUSED[fault]
        found = [
            f"{count} requests of {kind} ended with {outcome} although the fault was {fault!r}"
            for (kind, outcome), count in self.ends.items()
            if outcome != "ok" and outcome not in excused.get(kind, ())
        ]
        if self.sent != self.ends.total():
            found.append(f"{self.sent} requests were sent and {self.ends.total()} have an end")
        return [*self.faults, *found]


class StrictCaller(Caller):
    """A caller that notices an answer to no request."""

    def __init__(self) -> None:
        super().__init__()
        self.unasked = 0

    def on_message_complete(self) -> None:
        if self._reply is None or self._reply.done():
            self.unasked += 1
        super().on_message_complete()


# The clients.


class Client:
    """One client of a kind, until `ended` is set. patience: seconds until an answer counts as lost."""

    kind = ""

    def __init__(self, server: Any, ledger: Ledger, chance: random.Random, patience: float = PATIENCE_SECONDS) -> None:
        """server: a Server, or anything else with its addresses."""
        self._server = server
        self._ledger = ledger
        self._chance = chance
        self._patience = patience

    async def run(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            await self.story()
        await self.close()

    async def story(self) -> None:
        """Send one request, or the chunks of one session."""
        raise NotImplementedError

    async def close(self) -> None:
        """Check for answers to no request, and disconnect."""

    def values(self) -> list[int]:
        return self._chance.choices((-1, 0, 1), k=self._chance.randint(1, MOST_STEPS))

    async def ask(self, send: Callable[[], Awaitable[tuple[str, Account | None]]], expected: Account, what: object) -> bool:
        """Send a request, count its end, and compare the answer. Returns whether it was answered.

        send: returns the outcome, and for ok the account in the answer. Raises OSError when the connection breaks.
        """
        self._ledger.sent += 1
        try:
            async with asyncio.timeout(self._patience):
                outcome, told = await send()
        except TimeoutError:
            self._ledger.wrong(f"no answer to {self.kind} {what} in {self._patience:g} s")
            outcome, told = "lost", None
        except (OSError, ConnectionClosed, InvalidHandshake):
            outcome, told = CUT, None
        self._ledger.end(self.kind, outcome)
        if outcome == "ok" and told != expected:
            self._ledger.wrong(f"{told}, not {expected}, to {self.kind} {what}")
        if outcome == CUT:
            await asyncio.sleep(0.05)
        return outcome == "ok"


def as_ids(values: Sequence[int]) -> bytes:
    """Return the ids of the accumulator that stand for values, as raw int32."""
    return np.array([value + 1 for value in values], IDS).tobytes()


class HttpClient(Client):
    """Requests without a session, each for a different sum, on one connection."""

    kind = "http"
    _caller: StrictCaller | None = None

    async def story(self) -> None:
        values = self.values()
        body = {"model": "accumulator", "inputs": [[value + 1 for value in values]]}
        await self.ask(lambda: self._send(body), Account().plus(values), values)

    async def close(self) -> None:
        if self._caller is not None:
            await asyncio.sleep(0.05)
            self._count_unasked()
            self._caller.hang_up()

    async def _send(self, body: dict[str, Any]) -> tuple[str, Account | None]:
        target = Target.of(self._server.address, "/infer")
        if self._caller is None or not self._caller.connected:
            self._count_unasked()
            _, self._caller = await asyncio.get_running_loop().create_connection(StrictCaller, target.host, target.port)
        try:
            reply = await self._caller.ask(target.request(json.dumps(body).encode()))
        except asyncio.CancelledError:
            self._caller.hang_up()
            raise
        return outcome_of(reply)

    def _count_unasked(self) -> None:
        if self._caller is not None and self._caller.unasked:
            self._ledger.wrong(f"{self._caller.unasked} answers to no request of {self.kind}")
            self._caller.unasked = 0


def outcome_of(reply: Response) -> tuple[str, Account | None]:
    """Return the outcome in a reply of POST /infer, and its account."""
    said = json.loads(reply.body)
    return ("ok", Account.told(said["outputs"][0]["value"])) if reply.status == 200 else (said["code"], None)


class SessionClient(HttpClient):
    """Sessions of CHUNKS chunks, whose sums continue from chunk to chunk."""

    kind = "session"

    async def story(self) -> None:
        name, account = f"{self._chance.getrandbits(64):x}", Account()
        for number in range(CHUNKS):
            values = self.values()
            account = account.plus(values)
            body: dict[str, Any] = {"model": "accumulator", "session": name, "inputs": [[value + 1 for value in values]]}
            body |= {"start": number == 0, "end": number == CHUNKS - 1}
            if not await self.ask(lambda body=body: self._send(body), account, (name, number)):  # type: ignore[misc]
                return


class GrpcClient(Client):
    """Unary calls, each for a different sum, on one connection."""

    kind = "grpc"
    _caller: GrpcCaller | None = None

    async def story(self) -> None:
        values = self.values()
        await self.ask(lambda: self._send(values), Account().plus(values), values)

    async def close(self) -> None:
        if self._caller is not None:
            self._caller.hang_up()
            await self._caller._closing

    async def _send(self, values: Sequence[int]) -> tuple[str, Account | None]:
        method = oip_requests.METHOD
        message = method.request_type(model_name="accumulator", raw_input_contents=[as_ids(values)])
        message.inputs.add(name="ids", datatype="INT32", shape=[len(values)])
        message.outputs.add(name="value")
        if self._caller is None:
            self._caller = GrpcCaller(self._server.grpc, oip_requests.PATH)
        reply = await self._caller.ask(message.SerializeToString())
        if reply.status != 200:
            said = json.loads(reply.body)
            return said["reason"] or said["code"], None
        return "ok", Account.told(struct.unpack("<2f", method.response_type.FromString(reply.body).raw_output_contents[0]))


class StreamClient(Client):
    """WebSockets, each a session of CHUNKS chunks."""

    kind = "stream"

    async def story(self) -> None:
        stream: Any = None
        account = Account()
        try:
            for _ in range(CHUNKS):
                values = self.values()
                account = account.plus(values)

                async def send(values: Sequence[int] = values) -> tuple[str, Account | None]:
                    nonlocal stream
                    if stream is None:
                        address = self._server.address.replace("http", "ws", 1)
                        stream = await connect(f"{address}/stream?model=accumulator", proxy=None, open_timeout=None)
                    await stream.send(as_ids(values))
                    said = json.loads(await stream.recv())
                    return ("ok", Account.told(said["outputs"][0]["value"])) if "outputs" in said else (said["code"], None)

                if not await self.ask(send, account, values):
                    return
        finally:
            if stream is not None:
                with suppress(OSError, ConnectionClosed):
                    await stream.close()


CLIENTS: dict[str, type[Client]] = {client.kind: client for client in (HttpClient, GrpcClient, SessionClient, StreamClient)}


# Faults.


class FaultInjector:
    """Applies one fault to a server."""

    def __init__(self, server: Server, models_folder: Path, chance: random.Random) -> None:
        self._server = server
        self._models = models_folder
        self._chance = chance
        self._version = 1

    async def inject(self, fault: str) -> None:
        await asyncio.to_thread(self._inject, fault)

    def _inject(self, fault: str) -> None:
        verb, _, role = fault.partition(" ")
        if role in ("engine", "frontend"):
            self._signal(f"{role}-{self._chance.randrange(2)}", signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
        elif fault == "reload":
            self._reload()
        elif fault == "hang up":
            self._hang_up()
        elif fault == "full disk":
            self._fill_disk()

    def _signal(self, name: str, number: int) -> None:
        """Send a signal to a process, and wait until another has replaced it."""
        before = self._server.pid(name)
        os.kill(before, number)
        eventually(lambda: self._server.pid(name) != before)

    def _reload(self) -> None:
        """Replace the version by an equal version. Sessions keep the old version."""
        folder, before = self._models / "accumulator", self._version
        self._version += 1
        shutil.copytree(folder / "1", folder / str(self._version))
        load(self._server, "accumulator", policy={"specific": {"versions": [self._version]}})
        if before > 1:
            shutil.rmtree(folder / str(before))

    def _fill_disk(self) -> None:
        """Let no process write to a file for a while, in which a version is replaced."""
        with full_disk(processes(self._server).values()):
            self._reload()
            time.sleep(FULL_SECONDS)

    def _hang_up(self) -> None:
        """Let clients disconnect while their requests run."""
        uvloop.run(_hang_up(Target.of(self._server.address, "/infer"), self._chance))


async def _hang_up(target: Target, chance: random.Random) -> None:
    request = target.request(json.dumps({"model": "accumulator", "inputs": [[1] * 20_000]}).encode())
    for _ in range(HANG_UPS):
        caller = await Caller.connect(target)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(chance.uniform(0, 0.05)):
                await caller.ask(request)
        caller.hang_up()


# Growth.


class Sample(NamedTuple):
    """The resources of a process at rest after `sent` requests."""

    pid: int
    sent: int
    bytes: int
    descriptors: int
    threads: int


def sample(server: Server, sent: int) -> dict[str, Sample]:
    """Return a sample of each process."""
    return {
        name: Sample(
            pid,
            sent,
            resident_bytes(pid),
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            len(list(Path(f"/proc/{pid}/task").iterdir())),
        )
        for name, pid in processes(server).items()
    }


class Slope(NamedTuple):
    """A slope per request with its interval of confidence."""

    low: float
    middle: float
    high: float


def slope(points: Iterable[Sequence[tuple[int, float]]], confidence: float = CONFIDENCE) -> Slope | None:
    """Return Sen's slope over several series, which are compared only within themselves: Hirsch and Slack's seasonal form.

    points: series of (requests, value). The interval is that of Gilbert (1987), from the variance of Kendall's statistic. None with too few
    points.
    """
    slopes, variance = list[float](), 0.0
    for series in points:
        count = len(series)
        if count < MIN_SAMPLES:
            continue
        slopes += [
            (later[1] - earlier[1]) / (later[0] - earlier[0])
            for index, earlier in enumerate(series)
            for later in series[index + 1 :]
            if later[0] > earlier[0]
        ]
        ties = Counter(value for _, value in series).values()
        variance += (count * (count - 1) * (2 * count + 5) - sum(tie * (tie - 1) * (2 * tie + 5) for tie in ties)) / 18
    if not slopes:
        return None
    slopes.sort()
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance)
    low = slopes[max(0, math.floor((len(slopes) - reach) / 2))]
    high = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))]
    return Slope(low, slopes[len(slopes) // 2], high)


def growth(samples: Sequence[dict[str, Sample]]) -> dict[str, Slope]:
    """Return the slope of each quantity of each role. A process's first sample is left out: its memory pools fill before the second."""
    series: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for one in samples:
        for name, each in one.items():
            series[name.partition("-")[0]][each.pid].append(each)
    found = {}
    for role, by_pid in series.items():
        for quantity in LIMITS:
            lines = [[(one.sent, float(getattr(one, quantity))) for one in each[1:]] for each in by_pid.values()]
            if (there := slope(lines)) is not None:
                found[f"{role} {quantity}"] = there
    return found


def growing(slopes: dict[str, Slope]) -> dict[str, Slope]:
    """Return the quantities that grow by more than their limit, surely."""
    return {name: each for name, each in slopes.items() if each.low > LIMITS[name.partition(" ")[2]]}


# The soak.


@dataclass
class Soak:
    """Cycles of load with one fault each, on one server."""

    server: Server
    models_folder: Path
    seed: int = 0
    cycle_seconds: float = CYCLE_SECONDS
    samples: list[dict[str, Sample]] = field(default_factory=list)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._injector = FaultInjector(self.server, self.models_folder, self._chance)

    def cycle(self, fault: str) -> list[str]:
        """Run a cycle with a fault in it. Returns the faults found."""
        ledger = Ledger()
        uvloop.run(self._load(ledger, fault))
        found = ledger.unexplained(fault)
        found += self._rest()
        self.ends += ledger.ends
        self.samples.append(sample(self.server, self.ends.total()))
        self.faults += found
        return found

    async def _load(self, ledger: Ledger, fault: str) -> None:
        ended, seeds = asyncio.Event(), self._chance
        async with asyncio.TaskGroup() as running:
            for kind, count in CALLERS.items():
                for _ in range(count):
                    client = CLIENTS[kind](self.server, ledger, random.Random(seeds.getrandbits(64)))
                    running.create_task(client.run(ended))
            until = time.monotonic() + self.cycle_seconds
            await asyncio.sleep(self.cycle_seconds * seeds.uniform(0.2, 0.5))
            await self._injector.inject(fault)
            await asyncio.sleep(max(0.0, until - time.monotonic()))
            ended.set()

    def _rest(self) -> list[str]:
        """Wait until the server holds nothing and runs all its processes. Returns the disagreements of its counts."""
        names = ("requests_in_flight", "queue_depth", "sequences_begun")
        eventually(lambda: self.server.ready() and not any(self.server.metric(f"seqserve_{name}") for name in names), 60)
        counts = Counts.of(self.server.scrape())
        if counts.accepted != counts.in_flight + counts.outcomes.total():
            return [f"the server accepted {counts.accepted} requests, and {counts.outcomes.total()} have an outcome"]
        return []


def run(
    server: Server, folder: Path, seconds: float, cycle_seconds: float, seed: int, show: Callable[[str], object]
) -> list[str]:
    """Run cycles for a number of seconds, each with the next fault of FAULTS. Returns the faults found, including growth."""
    soak, until = Soak(server, folder, seed, cycle_seconds), time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        fault = FAULTS[number % len(FAULTS)]
        found, number = soak.cycle(fault), number + 1
        show(f"cycle {number}, {fault}: {soak.ends.total()} requests so far{''.join(f'; WRONG: {each}' for each in found[:5])}")
    slopes = growth(soak.samples)
    for name, each in slopes.items():
        show(f"{name} per request: {each.middle:.2g}, from {each.low:.2g} to {each.high:.2g}")
    show(f"ends: {', '.join(f'{kind} {outcome} {count}' for (kind, outcome), count in sorted(soak.ends.items()))}")
    return [*soak.faults, *(f"{name} grows by {each.middle:.3g} per request" for name, each in growing(slopes).items())]


def main() -> int:
    """Return 0 when every request is accounted for and nothing grows."""
    parser = argparse.ArgumentParser(description="Mixed load with one fault a minute, and an account of every request.")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument(
        "--cycle", type=float, default=CYCLE_SECONDS, metavar="SECONDS", help="length of a cycle with one fault"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, scratch = Path(folder) / "models", Path(folder)
        models.accumulator(root)
        with serving(root, scratch, *FLAGS) as server:
            found = run(server, root, 3600 * options.hours, options.cycle, options.seed, lambda line: print(line, flush=True))
    print(f"{len(found)} faults" + "".join(f"\n  {each}" for each in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
