"""Clients that stream sessions to several replicas, over HTTP, WebSockets and gRPC, and know the exact answer of every chunk.

A balancer decides where the next chunk of a session goes: to a replica, or to a proxy that chooses a replica.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import grpc
from tritonclient.grpc import service_pb2
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from loadtest.target import JSON, Target
from tests.accumulator import NEW, Account
from tests.callers import Caller
from tests.cluster.shipped import REPLICA_HEADER, Front

SESSION_HEADER = "x-session-id"
READY_SECONDS = 0.1
"""Interval of the checks whether replicas are ready."""
STEPS = 3
"""Steps of each chunk."""
PATIENCE_SECONDS = 20.0
RETRY_SECONDS = 0.02
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
CALL_METADATA = ("triton_grpc_error", "true")
"""The first error ends a call, and its status has the code."""
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclass
class Report:
    """The observations of the clients."""

    answered: Counter[str] = field(default_factory=Counter)
    """Chunks by kind of stream."""
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Answers that told the client to send the chunk again."""
    moved: Counter[str] = field(default_factory=Counter)
    """Chunks that another replica answered than the chunk before, by kind of stream."""
    reconnected: Counter[str] = field(default_factory=Counter)
    """Streams that the service ended with the code that asks the client to return, by kind."""


class Place(NamedTuple):
    """HOST:PORT of a replica or of a proxy, for HTTP and for gRPC."""

    http: str
    grpc: str


class Balancer:
    """Decides where the next chunk of a session goes."""

    def of(self, session: str) -> Place | None:
        """Return the place, None while no replica is ready."""
        raise NotImplementedError

    def drop(self, address: str) -> None:
        """A connection to an HTTP address has failed."""

    async def watch(self) -> None:
        """Follow the replicas."""


class Rendezvous(Balancer):
    """Chooses a replica as a proxy with consistent hashing does: by rendezvous hashing over the replicas that are ready.

    When the replicas change, so do the places of some sessions.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        """places: of all replicas that may be started."""
        self._places = places
        self._ready: list[Place] = []

    async def watch(self) -> None:
        while True:
            answers = await asyncio.gather(*(self._is_ready(place.http) for place in self._places))
            self._ready = [place for place, ready in zip(self._places, answers, strict=True) if ready]
            await asyncio.sleep(READY_SECONDS)

    def of(self, session: str) -> Place | None:
        return max(self._ready, key=lambda place: blake2b(f"{place.http} {session}".encode()).digest(), default=None)

    def drop(self, address: str) -> None:
        """The replica is not ready, until the next check."""
        self._ready = [place for place in self._ready if place.http != address]

    @staticmethod
    async def _is_ready(address: str) -> bool:
        try:
            async with asyncio.timeout(1.0):
                caller = await Caller.connect(Target.of(f"http://{address}", "/infer"))
                try:
                    reply = await caller.ask(f"GET /readyz HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
                finally:
                    caller.hang_up()
        except (OSError, TimeoutError, EOFError):
            return False
        return reply.status == 200


class ThroughProxy(Balancer):
    """Sends everything to a proxy."""

    def __init__(self, front: Front) -> None:
        self._place = Place(front.address.removeprefix("http://"), front.grpc)

    def of(self, session: str) -> Place | None:
        return self._place


class Answer(NamedTuple):
    """The account that an answer reports, and the replica that answered."""

    told: Account
    replica: str


class Refusal(NamedTuple):
    """A chunk without an answer, with the code of the service's error or another reason. steps: of the session, if the error names them."""

    code: str
    steps: int | None = None
    message: str = ""


class Stream:
    """A session and its client."""

    kind = ""

    def __init__(self, name: str, balancer: Balancer, report: Report, interval: float) -> None:
        self.name = name
        self.account = NEW
        self._balancer = balancer
        self._report = report
        self._interval = interval
        self._chance = random.Random(name)
        self._last = ""
        """The replica that answered last."""
        self._connected_to = ""
        """The address of a connection that stays with its replica, even if the session's place changes."""

    async def run(self, until: asyncio.Event) -> None:
        """Send chunk after chunk."""
        await asyncio.sleep(self._chance.random() * self._interval)
        while not until.is_set():
            await self._chunk([self._chance.choice((-1, 0, 1)) for _ in range(STEPS)])
            await asyncio.sleep(self._interval * self._chance.uniform(0.8, 1.2))

    async def _chunk(self, values: Sequence[int]) -> None:
        """Send a chunk until it is answered."""
        began, reason = time.monotonic(), "not sent"
        while time.monotonic() - began < PATIENCE_SECONDS:
            place = self._balancer.of(self.name)
            reply: Answer | Refusal = Refusal("no replica is ready")
            try:
                if place is not None:
                    reply = await self._ask(place, [value + 1 for value in values])
            except (OSError, EOFError, ConnectionClosed, InvalidHandshake, TimeoutError) as error:
                self._balancer.drop(self._connected_to or (place.http if place else ""))
                reply = Refusal(type(error).__name__)
            if isinstance(reply, Answer):
                self._answered(values, reply)
                return
            code, reason = reply.code, f"{place}: {reply}"
            if code == "session_conflict" and reply.steps == self.account.steps + STEPS:
                # The chunk was applied, and its answer was lost with the connection.
                self.account = self.account.plus(values)
                self._report.refused["applied already"] += 1
                return
            self._report.refused[code] += 1
            if code == "unknown_session" or (code.startswith("session_") and code != "session_unreachable"):
                break
            await asyncio.sleep(RETRY_SECONDS)
        self._report.failed.append(f"{self.name} at {self.account.steps} steps: {reason}")
        self.account = NEW

    def _answered(self, values: Sequence[int], answer: Answer) -> None:
        report, (told, replica) = self._report, answer
        expected = self.account.plus(values)
        if told != expected:
            report.wrong.append(f"{self.name}: {told}, not {expected}")
        report.answered[self.kind] += 1
        report.moved[self.kind] += self._last not in ("", replica)
        self.account, self._last = told, replica

    def _continues(self) -> dict[str, int | bool]:
        """Return the fields of a chunk in JSON that name its place in the session."""
        return {"start": True} if self.account == NEW else {"steps": self.account.steps}

    async def _ask(self, place: Place, ids: Sequence[int]) -> Answer | Refusal:
        """Send a chunk, and return the reply."""
        raise NotImplementedError

    async def close(self) -> None:
        """Hang up."""


def read(body: bytes | str, replica: str) -> Answer | Refusal:
    """Return the reply in a JSON body. Raises ValueError for another body."""
    fields = json.loads(body)
    if "code" in fields:
        return Refusal(fields["code"], fields.get("steps"), fields["error"])
    return Answer(Account.told(fields["outputs"][0]["value"]), replica)


class NamedCaller(Caller):
    """Notes which replica has replied, if the proxy names it."""

    replica = ""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header. Called by the parser."""
        if name.lower() == REPLICA_HEADER.encode():
            self.replica = value.decode()


class HttpStream(Stream):
    """Sends chunks to POST /infer, over one connection for each place."""

    kind = "HTTP"
    _caller: tuple[str, NamedCaller] | None = None

    async def _ask(self, place: Place, ids: Sequence[int]) -> Answer | Refusal:
        target = Target.of(f"http://{place.http}", "/infer")
        if self._caller is None or self._caller[0] != place.http or not self._caller[1].connected:
            await self.close()
            caller = await NamedCaller.connect(target)
            assert isinstance(caller, NamedCaller)
            self._caller = place.http, caller
        body = {"model": "accumulator", "inputs": [ids], "session": self.name, **self._continues()}
        caller = self._caller[1]
        async with asyncio.timeout(PATIENCE_SECONDS):
            reply = await caller.ask(target.request(json.dumps(body).encode(), JSON, f"{SESSION_HEADER}: {self.name}"))
        try:
            return read(reply.body, caller.replica or place.http)
        except ValueError:
            return Refusal(f"{reply.status} of the proxy")

    async def close(self) -> None:
        if self._caller is not None:
            self._caller[1].hang_up()
            self._caller = None


class SocketStream(Stream):
    """Sends chunks over a WebSocket, which stays with its replica until that closes it."""

    kind = "WebSocket"
    _socket: ClientConnection | None = None
    _replica = ""

    async def _ask(self, place: Place, ids: Sequence[int]) -> Answer | Refusal:
        if self._socket is None:
            self._connected_to = place.http
            address = f"ws://{place.http}/stream?model=accumulator&session={self.name}"
            self._socket = await connect(address, proxy=None, open_timeout=PATIENCE_SECONDS)
            assert self._socket.response is not None
            self._replica = self._socket.response.headers.get(REPLICA_HEADER, place.http)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._socket.send(json.dumps({"input": ids, **self._continues()}))
                return read(await self._socket.recv(), self._replica)
        except ConnectionClosed as closed:
            self._socket = None
            if closed.rcvd is not None and closed.rcvd.code == 1012:
                self._report.reconnected[self.kind] += 1
            raise

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()


class CallStream(Stream):
    """Sends chunks on a gRPC call, ModelStreamInfer, which stays with its replica until that ends it."""

    kind = "gRPC"
    _channel: Any = None
    _call: Any = None

    async def _ask(self, place: Place, ids: Sequence[int]) -> Answer | Refusal:
        if self._call is None:
            self._open(place)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                if not self._call.done():
                    await self._call.write(self._message(ids))
                answer = await self._call.read()
                replica = dict(await self._call.initial_metadata()).get(REPLICA_HEADER, self._connected_to)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            refusal = await self._ended()
            await self.close()
            return refusal
        response = answer.infer_response
        [values] = [
            contents
            for output, contents in zip(response.outputs, response.raw_output_contents, strict=True)
            if output.name == "value"
        ]
        return Answer(Account.told(memoryview(values).cast("f").tolist()), replica)

    def _open(self, place: Place) -> None:
        self._connected_to = place.http
        self._channel = grpc.aio.insecure_channel(place.grpc, options=OWN_CONNECTION)
        method = self._channel.stream_stream(
            STREAM_INFER, service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelStreamInferResponse.FromString
        )
        self._call = method(metadata=((SESSION_HEADER, self.name), CALL_METADATA))

    def _message(self, ids: Sequence[int]) -> Any:
        data = b"".join(id.to_bytes(4, "little") for id in ids)
        request = service_pb2.ModelInferRequest(model_name="accumulator", raw_input_contents=[data])
        request.inputs.add(name="ids", datatype="INT32", shape=[1, len(ids)])
        if self.account == NEW:
            request.parameters["sequence_start"].bool_param = True
        else:
            request.parameters["sequence_steps"].int64_param = self.account.steps
        return request

    async def _ended(self) -> Refusal:
        """Return why the call has ended."""
        trailing = dict(await self._call.trailing_metadata() or ())
        status, details = await self._call.code(), str(await self._call.details())
        code = trailing.get("seqserve-code")
        if code is None:
            self._balancer.drop(self._connected_to)
            return Refusal(str(status), message=details)
        # The status is UNAVAILABLE. HAProxy resets the stream after it, and some clients then report CANCELLED with the same metadata.
        if code == "unavailable":
            self._report.reconnected[self.kind] += 1
        return Refusal(str(code), message=details)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = self._call = None


class Streams:
    """All clients of a test, while they run."""

    def __init__(self, balancer: Balancer, *, http: int, sockets: int, calls: int, interval: float) -> None:
        """http, sockets, calls: how many sessions of each kind. interval: mean seconds between two chunks of a session."""
        self.report = Report()
        self._balancer = balancer
        kinds: list[tuple[type[Stream], int]] = [(HttpStream, http), (SocketStream, sockets), (CallStream, calls)]
        self._streams = [
            kind(f"{kind.kind}-{number}", balancer, self.report, interval) for kind, count in kinds for number in range(count)
        ]
        self._until = asyncio.Event()

    async def __aenter__(self) -> Streams:
        self._watching = asyncio.ensure_future(self._balancer.watch())
        while self._balancer.of("") is None:
            await asyncio.sleep(READY_SECONDS)
        self._running = [asyncio.ensure_future(stream.run(self._until)) for stream in self._streams]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._until.set()
        await asyncio.gather(*self._running)
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        await asyncio.gather(*(stream.close() for stream in self._streams))
        await asyncio.sleep(READY_SECONDS)  # transports close in a later tick
