"""Mixed load with one fault in each cycle, and an account of every request: `python -m tests.long.soak --hours 8`.

In each cycle clients send requests over HTTP and gRPC, chunks of sessions, and chunks over WebSockets, while one fault happens. Then the
clients finish, the server must come to rest, and the memory, the descriptors and the threads of each process are sampled.

Every answer is known beforehand (tests/accumulator.py). A request is answered once, refused once, or cut off. It may be refused or cut
off only where the fault of its cycle explains it; see EXCUSED. A session on an engine that has ended reports its loss once, and then it is
unknown. A frontend that has ended cuts off its own connections and no others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvloop
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from loadtest import oip_requests
from loadtest.target import Target
from service.ipc.messages import IDS
from service.ipc.session_placement import engine_of_session
from tests import models, planted
from tests.accumulator import NEW, Account, Counts
from tests.callers import Caller, GrpcCaller
from tests.long.environment import full_disk
from tests.reloading import load
from tests.serving import Server, alive, client_ports, eventually, serving
from tests.steady import Sample, Slope, growth, processes, sample

KINDS = ("http", "grpc", "session", "stream")
CALLERS = {"http": 6, "grpc": 4, "session": 6, "stream": 2}
FLAGS = ("--device", "cpu,cpu", "--frontends", "2")
"""Two processes of each role, so that one answers while the other is replaced."""
MOST_STEPS, CHUNKS = 20, 4
MOVED = 0.05
"""Share of the chunks of sessions after which the session is exported, deleted and imported again."""
PATIENCE_SECONDS = 60.0
"""How long a client waits. An answer that takes longer is lost."""
PAUSE_SECONDS = 0.05
FULL_SECONDS = 2.0
HANG_UPS = 20
CYCLE_SECONDS = 60.0
FRESH = 4
"""This many new connections in a row reach a frontend that knows both engines, before processes end."""
CUT = "cut"
OF_FRONTENDS = {kind: {CUT, "UNAVAILABLE"} for kind in KINDS}
OF_ENGINES = {kind: {"engine_lost", "session_lost", "unknown_session"} for kind in ("session", "stream")}
OF_ENGINES["stream"] |= {"session_conflict", "session_unreachable", CUT}
EXCUSED: dict[str, dict[str, set[str]]] = {
    "nothing": {},
    "hang up": {},
    "reload": {"session": {"session_conflict"}},
    "full disk": {"session": {"session_conflict"}},
    "stop engine": OF_ENGINES,
    "end engine": OF_ENGINES,
    "stop frontend": OF_FRONTENDS,
    "end frontend": OF_FRONTENDS,
    "end both": {kind: OF_FRONTENDS[kind] | OF_ENGINES.get(kind, set()) for kind in KINDS},
}
"""The ends without an answer that a fault explains, by kind of request. Requests without a session are answered through the end of an
engine. A process that ends does so at a random point on the way of a request. The state of a session fits no other version."""
FAULTS = tuple(EXCUSED)
LIMITS = {"bytes": 30.0, "descriptors": 1e-4, "threads": 1e-4}
"""What a process may gain with each request. The whole interval of confidence of a leak lies above it."""


# The account of all requests.


@dataclass
class Ledger:
    """The ends of all requests by kind, and all faults. cut: the clients' ports of connections that were cut off."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    sent: int = 0
    cut: set[int] = field(default_factory=set)
    engine_ends: Counter[int] = field(default_factory=Counter)
    """Rises for each engine when its end is near, and when it has ended."""
    losses: int = 0
    """Sessions whose loss was reported."""

    def unexplained(self, fault: str) -> list[str]:
        """Return the faults found after a cycle with this fault."""
        found = [
            f"{count} requests of {kind} ended with {outcome} although the fault was {fault!r}"
            for (kind, outcome), count in self.ends.items()
            if outcome != "ok" and outcome not in EXCUSED[fault].get(kind, ())
        ]
        if self.sent != self.ends.total():
            found.append(f"{self.sent} requests were sent and {self.ends.total()} have an end")
        return [*self.faults, *found]


# The clients.


class Client:
    """One client of a kind, until `ended` is set."""

    kind = ""

    def __init__(self, server: Server, ledger: Ledger, chance: random.Random) -> None:
        self._server = server
        self._ledger = ledger
        self._chance = chance

    async def run(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            await self.story()
        await self.close()

    async def story(self) -> None:
        """Send one request, or the chunks of one session."""
        raise NotImplementedError

    async def close(self) -> None:
        """Disconnect."""

    def values(self) -> list[int]:
        return self._chance.choices((-1, 0, 1), k=self._chance.randint(1, MOST_STEPS))

    async def ask(
        self, send: Callable[[], Awaitable[tuple[str, Account | None]]], expected: Account | None, what: object
    ) -> str:
        """Send a request, count its end, and compare the answer. Returns the outcome: ok, CUT, or the code of a refusal.

        send: returns the outcome, and for ok the account in the answer. Raises OSError when the connection breaks.
        """
        self._ledger.sent += 1
        told = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                outcome, told = await send()
        except TimeoutError:
            self._ledger.faults.append(f"no answer to {self.kind} {what} in {PATIENCE_SECONDS:g} s")
            outcome = "lost"
        except (OSError, ConnectionClosed, InvalidHandshake):
            outcome = CUT
        self._ledger.ends[self.kind, outcome] += 1
        if outcome == "ok" and told != expected:
            self._ledger.faults.append(f"{told}, not {expected}, to {self.kind} {what}")
        if outcome != "ok":
            await asyncio.sleep(PAUSE_SECONDS)
        return outcome


def as_ids(values: Sequence[int]) -> bytes:
    """Return the ids of the accumulator that stand for values, as raw int32."""
    return np.array([value + 1 for value in values], IDS).tobytes()


class HttpClient(Client):
    """Requests without a session, each for a different sum, on one connection."""

    kind = "http"
    _caller: Caller | None = None

    async def story(self) -> None:
        values = self.values()
        await self.ask(lambda: self.infer(values), NEW.plus(values), values)

    async def close(self) -> None:
        if self._caller is not None:
            await asyncio.sleep(PAUSE_SECONDS)
            self._caller.hang_up()
            self._check_unasked()

    async def infer(self, values: Sequence[int], **options: object) -> tuple[str, Account | None]:
        target = Target.of(self._server.address, "/infer")
        body = {"model": "accumulator", "inputs": [[value + 1 for value in values]], **options}
        code, reply = await self.send(target.request(json.dumps(body).encode()))
        return code, Account.told(json.loads(reply)["outputs"][0]["value"]) if code == "ok" else None

    async def send(self, request: bytes) -> tuple[str, bytes]:
        """Return the outcome and the body of the reply."""
        if self._caller is None or not self._caller.connected:
            self._check_unasked()
            self._caller = await Caller.connect(Target.of(self._server.address, "/infer"))
        try:
            reply = await self._caller.ask(request)
        except asyncio.CancelledError:
            self._caller.hang_up()
            raise
        except OSError:
            self._ledger.cut.add(self._caller.port)
            raise
        return ("ok" if reply.status == 200 else str(json.loads(reply.body)["code"])), reply.body

    def _check_unasked(self) -> None:
        if self._caller is not None and self._caller.unasked:
            self._ledger.faults.append(f"{self._caller.unasked} answers to no request of {self.kind}")


class SessionClient(HttpClient):
    """One session after another, whose sums continue from chunk to chunk. Some are exported, deleted and imported meanwhile.

    A session goes on until its engine ends, or until a frontend that has its chunk ends. After the end of its engine it reports the loss
    once, and then it is unknown.
    """

    kind = "session"

    async def story(self) -> None:
        self._name, self._account = f"{self._chance.getrandbits(64):x}", NEW
        self._place = engine_of_session(self._name, 2)
        ends = self._ledger.engine_ends[self._place]
        count = self._chance.randint(1, 3 * CHUNKS)
        for number in range(count):
            outcome = await self._chunk(end=number == count - 1)
            if outcome == "ok" and number < count - 1 and self._chance.random() < MOVED:
                outcome = await self._move()
            if outcome != "ok":
                break
        else:
            return
        if self._account == NEW or (outcome := await self._patient(outcome)) == CUT:
            return
        if outcome != "session_lost" or self._ledger.engine_ends[self._place] == ends:
            self._ledger.faults.append(f"session {self._name} on engine {self._place} ended with {outcome}")
        self._ledger.losses += 1
        await self._check_forgotten()

    async def _check_forgotten(self) -> None:
        """Check that a session whose loss was reported is unknown.

        A chunk that its engine had when it ended reports a loss again: the next engine cannot know of the first report. The engine may
        have ended as soon as it had reported the loss, and a frontend may send it a chunk before it notices the end.
        """
        reported = self._ends_before
        outcome = await self._patient(await self._chunk())
        if outcome == "session_lost" and self._ledger.engine_ends[self._place] > reported:
            await self._check_forgotten()
        elif outcome not in ("unknown_session", CUT):
            self._ledger.faults.append(f"session {self._name} was not forgotten: {outcome}")

    async def _patient(self, outcome: str) -> str:
        """Return the outcome once the engine of the session has restarted."""
        while outcome == "engine_lost":
            outcome = await self._chunk()
        return outcome

    async def _chunk(self, *, end: bool = False) -> str:
        values = self.values()
        expected = self._account.plus(values)
        self._ends_before = self._ledger.engine_ends[self._place]
        options = {"session": self._name, "start": self._account == NEW, "end": end}
        outcome = await self.ask(lambda: self.infer(values, **options), expected, self._name)
        if outcome == "ok":
            self._account = expected
        return outcome

    async def _move(self) -> str:
        """Export the session, delete it and import it. A session that is lost meanwhile is left."""
        state = b""
        for verb in ("GET", "DELETE", "PUT"):

            async def send(verb: str = verb) -> tuple[str, None]:
                nonlocal state
                body = state if verb == "PUT" else b""
                head = f"{verb} /sessions/{self._name}/state HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
                code, reply = await self.send(head.encode() + body)
                state = reply if verb == "GET" else state
                return code, None

            if (outcome := await self.ask(send, None, f"{verb} {self._name}")) != "ok":
                if verb != "GET":
                    self._account = NEW
                return outcome
        return "ok"


class GrpcClient(Client):
    """Unary calls, each for a different sum, on one connection."""

    kind = "grpc"
    _caller: GrpcCaller | None = None

    async def story(self) -> None:
        values = self.values()
        await self.ask(lambda: self._send(values), NEW.plus(values), values)

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
        account = NEW
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

                if await self.ask(send, account, values) != "ok":
                    return
        finally:
            if stream is not None:
                with suppress(OSError, ConnectionClosed):
                    await stream.close()


CLIENTS: dict[str, type[Client]] = {client.kind: client for client in (HttpClient, GrpcClient, SessionClient, StreamClient)}


# Faults.


class FaultInjector:
    """Applies one fault to a server."""

    def __init__(self, server: Server, models_folder: Path, ends: Path, chance: random.Random) -> None:
        """ends: the folder that tells processes to end."""
        self._server = server
        self._models = models_folder
        self._ends = ends
        self._chance = chance
        self._version = 1

    def inject(self, fault: str, ledger: Ledger) -> None:
        verb, _, role = fault.partition(" ")
        if verb in ("stop", "end"):
            self._replace(verb, ("engine", "frontend") if role == "both" else (role,), ledger)
        elif fault == "reload":
            self._reload()
        elif fault == "hang up":
            uvloop.run(_hang_up(Target.of(self._server.address, "/infer"), self._chance))
        elif fault == "full disk":
            with full_disk(processes(self._server).values()):
                self._reload()
                time.sleep(FULL_SECONDS)

    def _replace(self, verb: str, roles: Sequence[str], ledger: Ledger) -> None:
        """Stop one process of each role, or let it end at a point on the way of a request, and wait until others have replaced them."""
        eventually(self._complete)
        places = {role: self._chance.randrange(2) for role in roles}
        pids = {f"{role}-{place}": self._server.pid(f"{role}-{place}") for role, place in places.items()}
        spared = client_ports(self._server.pid(f"frontend-{1 - places['frontend']}")) if "frontend" in roles else set()
        ledger.engine_ends[places.get("engine", -1)] += 1
        for name, pid in pids.items():
            points = planted.POINTS if name.startswith("engine") else planted.FRONTEND_POINTS
            if verb == "stop":
                os.kill(pid, signal.SIGSTOP)
            else:
                (self._ends / "new").write_text(self._chance.choice(points))
                (self._ends / "new").rename(self._ends / str(pid))
        eventually(lambda: not any(map(alive, pids.values())))
        ledger.engine_ends[places.get("engine", -1)] += 1
        if wrongly := ledger.cut & spared:
            ledger.faults.append(f"{len(wrongly)} connections to a frontend that lived were cut off")
        eventually(self._complete)

    def _complete(self) -> bool:
        """Return whether all processes run and the frontends know both engines."""
        newest = {event["child"]: event["pid"] for event in self._server.events("started")}
        return all(map(alive, newest.values())) and all(self._knows_both() for _ in range(FRESH))

    def _knows_both(self) -> bool:
        try:
            listed = httpx.get(f"{self._server.address}/models", timeout=60, trust_env=False).json()["models"]
        except httpx.TransportError:
            return False
        return bool(listed) and listed[0]["device"] == "cpu, cpu"

    def _reload(self) -> None:
        """Replace the version by an equal version. Sessions keep the old version."""
        folder, before = self._models / "accumulator", self._version
        self._version += 1
        shutil.copytree(folder / "1", folder / str(self._version))
        load(self._server, "accumulator", policy={"specific": {"versions": [self._version]}})
        if before > 1:
            shutil.rmtree(folder / str(before))


async def _hang_up(target: Target, chance: random.Random) -> None:
    """Disconnect while requests run."""
    request = target.request(json.dumps({"model": "accumulator", "inputs": [[1] * 20_000]}).encode())
    for _ in range(HANG_UPS):
        caller = await Caller.connect(target)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(chance.uniform(0, 0.05)):
                await caller.ask(request)
        caller.hang_up()


# The soak.


class Soak:
    """Cycles of load with one fault each, on one server."""

    def __init__(self, server: Server, models_folder: Path, ends: Path, seed: int, crowd: int) -> None:
        """crowd: by how many the numbers of CALLERS are multiplied."""
        self._server = server
        self._crowd = crowd
        self._chance = random.Random(seed)
        self._injector = FaultInjector(server, models_folder, ends, self._chance)
        self._samples: list[dict[str, Sample]] = []
        self.ends: Counter[tuple[str, str]] = Counter()
        self.losses = 0

    def cycle(self, fault: str, seconds: float) -> list[str]:
        """Run a cycle with a fault in it. Returns the faults found."""
        ledger = Ledger()
        uvloop.run(self._load(ledger, fault, seconds))
        found = ledger.unexplained(fault) + self._rest()
        self.ends += ledger.ends
        self.losses += ledger.losses
        self._samples.append(sample(self._server, self.ends.total()))
        return found

    def run(
        self, seconds: float, cycle_seconds: float, show: Callable[[str], object], faults: Sequence[str] = FAULTS
    ) -> list[str]:
        """Run cycles for a number of seconds, each with the next fault. Returns the faults found, including growth."""
        until, found = time.monotonic() + seconds, list[str]()
        for number, fault in enumerate(cycle(faults)):
            if number and time.monotonic() >= until:
                break
            wrong = self.cycle(fault, cycle_seconds)
            found += wrong
            show(
                f"cycle {number}, {fault}: {self.ends.total()} requests so far{''.join(f'; WRONG: {each}' for each in wrong[:5])}"
            )
        for name, each in self.growth().items():
            show(f"{name} per request: {each.middle:.2g}, from {each.low:.2g} to {each.high:.2g}")
            if each.low > LIMITS[name.partition(" ")[2]]:
                found.append(f"{name} grows by {each.middle:.3g} per request")
        show(f"ends: {', '.join(f'{kind} {outcome} {count}' for (kind, outcome), count in sorted(self.ends.items()))}")
        return found

    def growth(self) -> dict[str, Slope]:
        return growth(self._samples)

    async def _load(self, ledger: Ledger, fault: str, seconds: float) -> None:
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as running:
            for kind, count in CALLERS.items():
                for _ in range(self._crowd * count):
                    client = CLIENTS[kind](self._server, ledger, random.Random(self._chance.getrandbits(64)))
                    running.create_task(client.run(ended))
            until = time.monotonic() + seconds
            try:
                await asyncio.sleep(seconds * self._chance.uniform(0.2, 0.5))
                await asyncio.to_thread(self._injector.inject, fault, ledger)
                await asyncio.sleep(max(0.0, until - time.monotonic()))
            finally:
                ended.set()

    def _rest(self) -> list[str]:
        """Wait until the server holds nothing and runs all its processes. Returns the disagreements of its counts."""
        names = ("requests_in_flight", "queue_depth", "sequences_begun")
        eventually(lambda: self._server.ready() and not any(self._server.metric(f"seqserve_{name}") for name in names), 60)
        counts = Counts.of(self._server.scrape())
        if counts.accepted != counts.in_flight + counts.outcomes.total():
            return [f"the server accepted {counts.accepted} requests, and {counts.outcomes.total()} have an outcome"]
        return []


@contextmanager
def soaked(
    scratch: Path, faults: str = "", seed: int = 0, crowd: int = 1, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[Soak, Server]]:
    """Run a server for a soak. faults: planted in its processes besides the points at which they end."""
    root, ends = scratch / "models", scratch / "ends"
    ends.mkdir()
    models.accumulator(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENDS", str(ends))
        planted.plant(f"ends-anywhere,{faults}", patch)
        with serving(root, scratch, *FLAGS, **(settings or {})) as server:
            yield Soak(server, root, ends, seed, crowd), server


def main() -> int:
    """Return 0 when every request is accounted for and nothing grows."""
    parser = argparse.ArgumentParser(description="Mixed load with one fault a minute, and an account of every request.")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument(
        "--cycle", type=float, default=CYCLE_SECONDS, metavar="SECONDS", help="length of a cycle with one fault"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, soaked(Path(folder), seed=options.seed) as (soak, _):
        found = soak.run(3600 * options.hours, options.cycle, lambda line: print(line, flush=True))
    print(f"{len(found)} faults" + "".join(f"\n  {each}" for each in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
