"""Clients for tests of a Ray cluster: sessions that know every sum, and requests that count failures."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.accumulator import AccumulatorSession, Chunk

CLIENTS = 4
SESSION_HEADER = "x-session-id"


def bearer(key: str) -> dict[str, str]:
    """Return the header with a key, none without one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def send_chunks(url: str, sessions: list[AccumulatorSession], chunks: int, seed: int = 0, key: str = "") -> list[str]:
    """Send `chunks` chunks of each session, from several clients at once. Returns the wrong sums, and the replies with another status."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        shares = [sessions[number::CLIENTS] for number in range(CLIENTS)]
        wrong = clients.map(lambda share: _send(url, share, chunks, random.Random(seed), key), shares)
    return [fault for faults in wrong for fault in faults]


@dataclass
class Rounds:
    """Chunks of all sessions in turn. faults: as `send_chunks` returns them."""

    count: int = 0
    faults: list[str] = field(default_factory=list)


@contextmanager
def rounds_of_chunks(url: str, sessions: list[AccumulatorSession], key: str = "") -> Iterator[Rounds]:
    """Send a chunk of each session in each round, until the end of the block."""
    rounds, ended = Rounds(), threading.Event()

    def send() -> None:
        while not ended.is_set():
            rounds.faults += send_chunks(url, sessions, 1, rounds.count, key)
            rounds.count += 1

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        try:
            yield rounds
        finally:
            ended.set()
    sending.result()


def _send(url: str, sessions: list[AccumulatorSession], chunks: int, chance: random.Random, key: str) -> list[str]:
    faults = []
    with httpx.Client(base_url=url, timeout=60, trust_env=False, headers=bearer(key)) as client:
        for _ in range(chunks):
            for session in chance.sample(sessions, len(sessions)):
                chunk = Chunk(chance.choices((1, -1, 0), k=chance.randint(1, 8)))
                answer = client.post("/infer", json=body(chunk, session.name), headers={SESSION_HEADER: session.name})
                if answer.status_code != 200:
                    faults.append(f"{session.name}: {answer.status_code} {answer.text}")
                elif fault := session.answered(chunk, answer.content):
                    faults.append(fault)
    return faults


def body(chunk: Chunk, session: str | None = None) -> dict[str, Any]:
    """Return the body of a chunk, or of the same steps without a session."""
    named = {} if session is None else {"session": session, "end": chunk.ends}
    return {"model": "accumulator", "inputs": [[value + 1 for value in chunk.values]], **named}


@dataclass
class Outcomes:
    """Replies by status and text, or exception; and the seconds at which the failed requests were sent and had failed."""

    counts: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[float, float]] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return self.counts["200"]


@contextmanager
def stateless_load(url: str, clients: int = CLIENTS, steps: int = 8, key: str = "") -> Iterator[Outcomes]:
    """Send requests without a session, from each client in sequence, until the end of the block."""
    outcomes, ended = Outcomes(), threading.Event()
    request = body(Chunk([1] * steps))

    def send() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False, headers=bearer(key)) as client:
            while not ended.is_set():
                sent = time.monotonic()
                try:
                    answer = client.post("/infer", json=request)
                    outcome = "200" if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"
                except httpx.TransportError as error:
                    outcome = type(error).__name__
                outcomes.counts[outcome] += 1
                if outcome != "200":
                    outcomes.failed.append((sent, time.monotonic()))

    with ThreadPoolExecutor(clients) as pool:
        sending = [pool.submit(send) for _ in range(clients)]
        try:
            yield outcomes
        finally:
            ended.set()
    for each in sending:
        each.result()
