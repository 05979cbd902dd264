"""Answers that are known beforehand: the sums of a model over the steps of a session, and the counts of a server's requests.

The model is `models.accumulator`: its recurrent state sums integers, exactly for up to LONGEST steps.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from loadtest.target import Target
from tests import models
from tests.callers import Caller
from tests.serving import Server, eventually

SMALL = {"state_slots": "64", "max_sessions": "1024", "session_idle_seconds": "600", "max_batch_tokens": "256"}
"""Settings with few state slots and small batches: sessions move to the host and back, and chunks run in several batches."""
REST = ("requests_in_flight", "queue_depth", "sequences_begun", "sessions", "state_slots_used")
REST_SECONDS = 5.0
"""Time limit until nothing is held after the last client has disconnected; a quiet machine needs a tenth of a second."""
LONGEST = 8192
SCRAPE_SECONDS = 0.25


# Expected answers of a session.


class Account(NamedTuple):
    """The sum and the number of the steps of a session."""

    sum: int = 0
    steps: int = 0

    def plus(self, values: Sequence[int]) -> Account:
        return Account(self.sum + sum(values), self.steps + len(values))

    @classmethod
    def told(cls, value: Sequence[float]) -> Account:
        """Return the account that an answer reports."""
        return cls(*map(integer, value))


NEW = Account()


def integer(value: float) -> int:
    """Return the count of a cell from its tanh."""
    return round(math.atanh(value) / models.COUNT) if abs(value) < 1 else sys.maxsize


# Counts of requests.


class Counts(NamedTuple):
    """A server's counts of requests: accepted, in flight, and finished by outcome."""

    accepted: int
    in_flight: int
    outcomes: Counter[str]

    @classmethod
    def of(cls, metrics: str) -> Counts:
        """Read the counts from the text of /metrics."""
        accepted, in_flight, outcomes = 0, 0, Counter[str]()
        for sample in (sample for family in text_string_to_metric_families(metrics) for sample in family.samples):
            if sample.name == "seqserve_requests_accepted_total":
                accepted += int(sample.value)
            elif sample.name == "seqserve_requests_in_flight":
                in_flight += int(sample.value)
            elif sample.name == "seqserve_requests_total":
                outcomes[sample.labels["outcome"]] += int(sample.value)
        return cls(accepted, in_flight, outcomes)

    def check(self) -> None:
        """Check that every accepted request is in flight or has one outcome."""
        assert self.accepted == self.in_flight + self.outcomes.total(), self

    def since(self, before: Counts) -> Counts:
        outcomes = Counter({name: count - before.outcomes[name] for name, count in self.outcomes.items()})
        return Counts(self.accepted - before.accepted, self.in_flight - before.in_flight, +outcomes)


def counts(server: Server) -> Counts:
    return Counts.of(server.scrape())


def at_rest(server: Server) -> Counts:
    """Return the counts once nothing is held any longer."""
    eventually(lambda: rests(server), REST_SECONDS)
    return counts(server)


def rests(server: Server) -> bool:
    """Return whether nothing is held of all that requests and sessions acquire and must release."""
    return not any(server.metric(f"seqserve_{name}") for name in REST)


async def watch(target: Target, ended: asyncio.Event) -> None:
    """Scrape the metrics repeatedly, and check the counts."""
    caller = await Caller.connect(target)
    try:
        while not ended.is_set():
            reply = await caller.ask(f"GET /metrics HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode())
            assert reply.status == 200
            Counts.of(reply.body.decode()).check()
            await asyncio.sleep(SCRAPE_SECONDS)
    finally:
        caller.hang_up()


# The clients.


def start_sessions(url: str, names: Sequence[str], callers: int = 32) -> Counter[int]:
    """Send a single step of each session, and return the statuses of the replies."""
    target, waiting, statuses = Target.of(url, "/infer"), iter(names), Counter[int]()

    async def start_some() -> None:
        caller = await Caller.connect(target)
        for name in waiting:
            body = {"model": "accumulator", "inputs": [[2]], "session": name}
            statuses[(await caller.ask(target.request(json.dumps(body).encode()))).status] += 1
        caller.hang_up()

    async def start_all() -> None:
        await asyncio.gather(*[start_some() for _ in range(callers)])

    uvloop.run(start_all())
    return statuses
