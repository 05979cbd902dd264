"""The input and the result of the generator. Times are in seconds."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from loadtest.target import Target

QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}


class Job(msgspec.Struct):
    """One load on one server.

    transport: "http", "grpc" or "websocket". path: the gRPC method, or the path and the query of a WebSocket; HTTP requests contain their
    own. requests: messages, or whole frames of a WebSocket. reader: a name in READERS. expected: the scores of each request. callers:
    connections. in_flight: open requests of a connection in a closed loop; only a WebSocket may have more than one. grace: time for the
    requests that are open at the end. rate: requests a second of an open loop, or 0 for a closed loop. arrivals: a name in ARRIVALS, for
    an open loop. period: seconds between the chunks of a stream in real time, of which each caller is one, or 0 for the other loops.
    chunks: of a stream; the requests are those of one stream after the other. headers: lines in the handshake of a WebSocket. pids: the
    processes of the server. tls: whether the server speaks TLS. ca: PEM file of the authority of its certificate, empty for the system's.
    """

    transport: str
    host: str
    port: int
    path: str
    requests: list[bytes]
    reader: str
    expected: list[list[float]]
    callers: int = 1
    in_flight: int = 1
    seconds: float = 1.0
    warm_up: float = 0.0
    grace: float = 1.0
    rate: float = 0.0
    arrivals: str = "poisson"
    period: float = 0.0
    chunks: int = 0
    headers: list[str] = msgspec.field(default_factory=list)
    seed: int = 0
    pids: list[int] = msgspec.field(default_factory=list)
    tls: bool = False
    ca: str = ""

    @classmethod
    def http(cls, target: Target, requests: list[bytes], **load: Any) -> Job:
        """Return a job of HTTP requests whose scores are not compared. load: more values of the job."""
        return cls("http", target.host, target.port, "", requests, "answer", [[]] * len(requests), tls=target.tls, **load)


class Result(msgspec.Struct):
    """Result of a job after its warm-up.

    due: requests of an open loop that were due in the measured time. answers: right answers that arrived in it, whenever their requests
    were due. latencies: of these answers, or in an open loop of all right answers to the requests that were due, as float64.
    cpu_seconds: processor time of the generator. server_cpu_seconds: processor time of each process in `pids`. delays: of the sending of
    each request that was due, as float64; only of streams in real time.
    """

    seconds: float
    due: int
    answers: int
    latencies: bytes
    failures: dict[str, int]
    cpu_seconds: float
    server_cpu_seconds: list[float]
    delays: bytes = b""

    def ordered_latencies(self) -> list[float]:
        return sorted(array("d", self.latencies))

    @property
    def rate(self) -> float:
        """Return the right answers a second."""
        return self.answers / self.seconds

    def milliseconds(self) -> dict[str, float]:
        """Return the quantiles of the latency by name, NaN without answers."""
        ordered = self.ordered_latencies()
        return {name: 1000 * nearest_rank(ordered, share) if ordered else math.nan for name, share in QUANTILES.items()}


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the ordered values that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
