"""Requests that wait for a later tick, over every transport of a running service. The fault short-ticks lets a tick start one request."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import uvloop

from loadtest.target import Target
from tests import models, planted
from tests.accumulator import LONGEST, Account, at_rest
from tests.callers import Caller
from tests.long import soak
from tests.serving import Server, eventually, serving

CALLERS, REQUESTS = 50, 20
LARGE_STEPS = 12_000
"""Steps of a request that counts among the bytes of waiting requests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models.accumulator(root)
    models.sensors(root)
    return root


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    planted.plant("short-ticks", monkeypatch)
    with serving(folder, tmp_path) as running:
        yield running


def request_of(target: Target, steps: int) -> bytes:
    """Return a request for the sum of this many steps."""
    return target.request(json.dumps({"model": "accumulator", "inputs": [[2] * steps]}).encode())


async def ask_in_turn(target: Target, seed: int, requests: int) -> list[int]:
    """Send requests on one connection. Return the statuses of the replies."""
    chance, found = random.Random(seed), []
    caller = await Caller.connect(target)
    for _ in range(requests):
        steps = chance.choice((1, 5, 100, LARGE_STEPS))
        reply = await caller.ask(request_of(target, steps))
        if reply.status == 200:
            assert steps_of(reply.body) == min(steps, LONGEST)
        found.append(reply.status)
    caller.hang_up()
    return found


def steps_of(answer: bytes) -> int:
    """Return the steps that an answer reports, up to LONGEST."""
    [output] = json.loads(answer)["outputs"]
    return min(Account.told(output["value"]).steps, LONGEST)


async def ask_together(target: Target, callers: int, requests: int) -> list[int]:
    found = await asyncio.gather(*(ask_in_turn(target, seed, requests) for seed in range(callers)))
    return [status for statuses in found for status in statuses]


@pytest.mark.parametrize("fault", ["nothing", "hang up"])
def test_all_requests_of_all_transports_are_accounted_for(fault: str, folder: Path, server: Server) -> None:
    assert soak.Soak(server, folder, cycle_seconds=3.0).cycle(fault) == []


def test_concurrent_requests_of_all_sizes_are_answered(server: Server) -> None:
    before = at_rest(server)
    found = uvloop.run(ask_together(Target.of(server.address, "/infer"), CALLERS, REQUESTS))
    assert found == [200] * CALLERS * REQUESTS
    assert at_rest(server).since(before).outcomes == {"ok": CALLERS * REQUESTS}


def test_stop_answers_the_requests_that_wait(server: Server) -> None:
    target = Target.of(server.address, "/infer")
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(lambda: uvloop.run(ask_together(target, CALLERS, 1)))
        eventually(lambda: server.metric("seqserve_requests_accepted_total") > 0)
        server.process.send_signal(signal.SIGTERM)
        assert asking.result() == [200] * CALLERS
    assert server.process.wait(60) == 0


def test_clients_that_leave_while_they_wait_are_counted(server: Server) -> None:
    target, before = Target.of(server.address, "/infer"), at_rest(server)

    async def leave() -> None:
        callers = await asyncio.gather(*(Caller.connect(target) for _ in range(CALLERS)))
        asking = [asyncio.ensure_future(caller.ask(request_of(target, LARGE_STEPS))) for caller in callers]
        await asyncio.sleep(0.01)
        for caller in callers[::2]:
            caller.hang_up()
        await asyncio.gather(*asking, return_exceptions=True)
        for caller in callers[1::2]:
            caller.hang_up()

    uvloop.run(leave())
    counts = at_rest(server).since(before)
    assert counts.outcomes.total() == counts.accepted == CALLERS
    assert counts.outcomes["ok"] >= CALLERS // 2 and counts.outcomes.keys() <= {"ok", "client_gone"}


def test_pipelined_requests_are_answered_in_their_order(server: Server) -> None:
    target = Target.of(server.address, "/infer")
    steps = np.random.default_rng(0).integers(1, 500, 40).tolist()

    async def pipeline() -> list[int]:
        reader, writer = await asyncio.open_connection(target.host, target.port)
        writer.write(b"".join(request_of(target, each) for each in steps))
        answers = []
        for _ in steps:
            head = await reader.readuntil(b"\r\n\r\n")
            [size] = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            answers.append(steps_of(await reader.readexactly(size)))
        writer.close()
        return answers

    async def both() -> list[int]:
        answers, _ = await asyncio.gather(pipeline(), ask_together(target, 8, 10))
        return answers

    assert uvloop.run(both()) == steps
