"""The soak (tests/soak.py) finds a lost, a doubled and a wrong answer, an end that no fault explains, and a leak."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tests import models
from tests.accumulator import Account
from tests.soak import FAULTS, HttpClient, Ledger, Sample, SessionClient, growing, growth, slope

REQUESTS = 40
SPOILT = 17
"""The request whose answer is corrupted."""


class Answering(asyncio.Protocol):
    """Answers requests for accumulator as the service does, except the request with the number SPOILT."""

    def __init__(self, fault: str, numbers: list[int]) -> None:
        self._fault = fault
        self._numbers = numbers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._numbers.append(len(self._numbers))
        spoilt = self._numbers[-1] == SPOILT
        [ids] = json.loads(data.partition(b"\r\n\r\n")[2])["inputs"]
        account = Account().plus([id - 1 for id in ids] + [1] * (spoilt and self._fault == "wrong"))
        value = [math.tanh(models.COUNT * each) for each in account]
        answer = json.dumps({"outputs": [{"value": value}]}).encode()
        if spoilt and self._fault == "refused":
            answer = json.dumps({"code": "overloaded"}).encode()
        status = b"503 Service Unavailable" if spoilt and self._fault == "refused" else b"200 OK"
        reply = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(answer), answer)
        if spoilt and self._fault == "cut":
            self._transport.abort()
        elif not (spoilt and self._fault == "lost"):
            self._transport.write(reply * (2 if spoilt and self._fault == "doubled" else 1))


def faults(fault: str, client: type[HttpClient] = HttpClient, during: str = "nothing") -> list[str]:
    """Return the findings of an account of REQUESTS requests to such a server, in a cycle with the fault `during`."""

    async def run() -> list[str]:
        numbers: list[int] = []
        server = await asyncio.get_running_loop().create_server(lambda: Answering(fault, numbers), "127.0.0.1", 0)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ledger = Ledger()
        one = client(SimpleNamespace(address=address), ledger, random.Random(0), patience=0.5)
        while len(numbers) < REQUESTS:
            await one.story()
        await one.close()
        server.close()
        assert ledger.sent >= REQUESTS
        return ledger.unexplained(during)

    return asyncio.run(run())


def test_requests_that_are_answered_once_are_accounted_for() -> None:
    assert faults("none") == []


@pytest.mark.parametrize("fault", ["lost", "doubled", "wrong", "refused", "cut"])
def test_planted_fault_of_an_answer_is_found(fault: str) -> None:
    assert len(found := faults(fault)) >= 1, found


def test_connection_may_end_with_its_frontend_and_for_no_other_reason() -> None:
    assert {during for during in FAULTS if not faults("cut", during=during)} == {"kill frontend", "stop frontend"}


def test_request_without_an_end_is_found() -> None:
    ledger = Ledger(Counter({("http", "ok"): 3}), sent=4)
    assert ledger.unexplained("nothing") == ["4 requests were sent and 3 have an end"]


def test_sum_that_does_not_go_on_from_chunk_to_chunk_is_found() -> None:
    """The server here forgets the session after each chunk."""
    assert any("session" in fault for fault in faults("none", SessionClient))


CYCLES, REQUESTS_PER_CYCLE, KILLED_EACH = 60, 5_000, 12


def samples(bytes_per_request: float, descriptors_per_cycle: float = 0.0) -> list[dict[str, Sample]]:
    """Return the samples of a frontend that is replaced now and then, with noise of a MiB and steps of an allocator."""
    chance, made, held = random.Random(1), list[dict[str, Sample]](), 0.0
    for cycle in range(CYCLES):
        age = cycle % KILLED_EACH
        held = bytes_per_request * age * REQUESTS_PER_CYCLE + (5 << 20) * min(age, 1) + chance.uniform(0, 1 << 20)
        descriptors = 20 + round(descriptors_per_cycle * age)
        made.append({"frontend-0": Sample(cycle // KILLED_EACH, cycle * REQUESTS_PER_CYCLE, round(held), descriptors, 4)})
    return made


def test_leak_is_found_across_replaced_processes() -> None:
    assert set(growing(growth(samples(100)))) == {"frontend bytes"}
    assert set(growing(growth(samples(0, descriptors_per_cycle=1)))) == {"frontend descriptors"}


def test_noise_and_first_steps_are_no_leak() -> None:
    slopes = growth(samples(0))
    assert growing(slopes) == {} and slopes["frontend bytes"].low < 0 < slopes["frontend bytes"].high


@pytest.mark.parametrize("per_request", [0.0, 50.0])
def test_interval_has_the_slope_as_often_as_it_says(per_request: float) -> None:
    def series(seed: int) -> Sequence[tuple[int, float]]:
        chance = random.Random(seed)
        return [(at * 100, at * 100 * per_request + chance.gauss(0, 1000)) for at in range(15)]

    within = 0
    for seed in range(200):
        found = slope([series(2 * seed), series(2 * seed + 1)], confidence=0.9)
        assert found is not None
        within += found.low <= per_request <= found.high
    assert within > 0.85 * 200
