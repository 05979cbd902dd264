"""Clients that know the answer to each of their requests, over HTTP, gRPC and WebSockets, and an account of all requests."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from loadtest import oip_requests
from loadtest.target import Target
from service.ipc.messages.inference import IDS
from service.ipc.session_placement import engine_of_session
from tests.accumulator import NEW, Account
from tests.callers import Caller, GrpcCaller
from tests.serving import Server

KINDS = ("http", "grpc", "session", "stream")
MOST_STEPS, CHUNKS = 20, 4
PATIENCE_SECONDS = 60.0
"""How long a client waits. An answer that takes longer is lost."""
PAUSE_SECONDS = 0.05
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
    """One session after another, whose sums continue from chunk to chunk.

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
