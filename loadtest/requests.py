"""The requests of each kind of client, as bytes that the load generator sends in a cycle, and a trial of them on a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loadtest import discovery, oip_requests
from loadtest.bench import GRACE_SECONDS
from loadtest.generator import websocket
from loadtest.generator.job import Job, Result
from loadtest.generator.process import divided, run_in_processes
from loadtest.servers import ServerProcess
from loadtest.target import Target
from loadtest.traffic import Traffic

QUESTIONS, SENSOR = "question-type-cnn", "sensor-forecast"
MANY = 64
"""Inputs of a large request."""
REQUESTS = 200
"""Distinct requests of each kind."""
SESSIONS = 256
"""Sessions that get chunks over POST /infer in turn."""
CPU, FRONTENDS, ENGINE, GENERATORS = "cpu_us", "frontends_us", "engine_us", "generators_us"
"""Microseconds of processor time for each answer: of all processes of a server, and of parts of them in this service."""


class Requests(NamedTuple):
    """The requests of one kind of client.

    transport, path, requests, reader, expected, chunks: as in `generator.job.Job`, `expected` empty if no score is compared; inputs:
    sequences of a request.
    """

    transport: str
    path: str
    requests: list[bytes]
    reader: str
    expected: Sequence[list[float]] = ()
    inputs: int = 1
    chunks: int = 0

    def job(self, server: ServerProcess, **load: Any) -> Job:
        """Return a job on a server. load: more values of the job."""
        host, port, path, tls = Target.of(f"http://{server.grpc}" if self.transport == "grpc" else server.url, self.path)
        expected = list(self.expected) or [[]] * len(self.requests)
        return Job(self.transport, host, port, path, self.requests, self.reader, expected, chunks=self.chunks, tls=tls, **load)

    def measure(self, server: ServerProcess, generators: int = 1, **load: Any) -> tuple[Result, dict[str, float]]:
        """Load a server. Returns the result, and microseconds of processor time for each answer. load: more values of the job."""
        roles = {role: server.pids(f"service.{role}") for role in ("frontend", "engine")}
        pids = server.pids()
        job = self.job(server, grace=GRACE_SECONDS, pids=pids, **load)
        result = run_in_processes(divided(job, generators))
        per_answer = 1e6 / max(1, result.answers)
        used = {pid: per_answer * seconds for pid, seconds in zip(pids, result.server_cpu_seconds, strict=True)}
        values = {CPU: sum(used.values()), GENERATORS: per_answer * result.cpu_seconds}
        if roles["frontend"]:
            values |= {
                FRONTENDS: sum(used[pid] for pid in roles["frontend"]),
                ENGINE: sum(used[pid] for pid in roles["engine"]),
            }
        return result, values


class Clients(NamedTuple):
    """Writes the requests to a server. models: its models folder. Its answers have the expected scores."""

    url: str
    models: Path

    def text(self) -> Requests:
        return self._questions(self._texts(), 1)

    def texts(self) -> Requests:
        return self._questions(self._texts(), MANY)

    def ids(self) -> Requests:
        return self._questions(Traffic(discovery.find(self.url, QUESTIONS)), MANY)

    def oip(self) -> Requests:
        return self._tensors("http", "", oip_requests.binary_text)

    def grpc(self) -> Requests:
        return self._tensors("grpc", oip_requests.PATH, oip_requests.text_message)

    def chunk(self, sessions: int = SESSIONS) -> Requests:
        bodies = [
            {"model": SENSOR, "inputs": [rows], "session": f"load-{sessions}-{number % sessions}"}
            for number, rows in enumerate(self._chunks(2 * SESSIONS))
        ]
        return Requests("http", "", [self._post(body) for body in bodies], "session")

    def socket_text(self) -> Requests:
        return self._socket(websocket.TEXT_FRAME, [json.dumps({"input": rows}).encode() for rows in self._chunks(REQUESTS)])

    def socket_binary(self) -> Requests:
        chunks = self._chunks(REQUESTS)
        return self._socket(websocket.BINARY_FRAME, [np.array(rows, "<f4").tobytes() for rows in chunks])

    def _texts(self) -> Traffic:
        return discovery.inputs(self.models, discovery.find(self.url, QUESTIONS))

    def _questions(self, traffic: Traffic, inputs: int) -> Requests:
        bodies = [traffic.body(inputs) for _ in range(REQUESTS)]
        expected = self._scores([body["inputs"][0] for body in bodies])
        return Requests("http", "", [self._post(body) for body in bodies], "infer", expected, inputs)

    def _tensors(self, transport: str, path: str, write: Callable[[str, str], bytes]) -> Requests:
        traffic = self._texts()
        texts = [str(traffic.input()) for _ in range(REQUESTS)]
        requests = [write(QUESTIONS, text) for text in texts]
        return Requests(transport, path, requests, "last floats", self._scores(texts))

    def _scores(self, inputs: Sequence[object]) -> list[list[float]]:
        """Return the scores of questions."""
        scores = list[list[float]]()
        for start in range(0, len(inputs), MANY):
            body = json.dumps({"model": QUESTIONS, "inputs": inputs[start : start + MANY]}).encode()
            answer = json.loads(discovery.fetch(f"{self.url}/infer", discovery.NO_ACCESS, body))
            scores += [list(output["scores"].values()) for output in answer["outputs"]]
        return scores

    def _chunks(self, count: int) -> list[Any]:
        """Return chunks of one row for the sensor model."""
        traffic = Traffic(discovery.find(self.url, SENSOR))
        return [traffic.input(1) for _ in range(count)]

    def _post(self, body: dict[str, Any]) -> bytes:
        return Target.of(self.url, "/infer").request(json.dumps(body).encode())

    def _socket(self, kind: int, payloads: list[bytes]) -> Requests:
        return Requests("websocket", f"/stream?model={SENSOR}", [websocket.frame(kind, each) for each in payloads], "session")


KINDS: dict[str, Callable[[Clients], Requests]] = {
    "text": Clients.text,
    "texts": Clients.texts,
    "ids": Clients.ids,
    "oip": Clients.oip,
    "grpc": Clients.grpc,
    "chunk": Clients.chunk,
    "socket-text": Clients.socket_text,
    "socket-binary": Clients.socket_binary,
}
"""One text a request, 64 texts, 64 lists of token ids; one text as a raw tensor over REST and over gRPC; and chunks of one row over
POST /infer and over a WebSocket, as JSON and as raw values."""
