"""The loops count right answers only, and an open loop counts latency from the time when a request was due."""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from typing import Any

import pytest
import uvloop
from msgspec import structs

from loadtest.discovery import CannotMeasure
from loadtest.generator.job import Job, Result
from loadtest.generator.loops import UNANSWERED, WRONG, run
from loadtest.generator.process import divided, merged, run_in_process
from tests.loadtest.conftest import Handler, answering, reply

SCORES = [0.5, 0.25]
RIGHT = reply(json.dumps({"scores": SCORES}).encode())
NEARLY = reply(json.dumps({"scores": [0.50004, 0.25]}).encode())
FALSE = reply(json.dumps({"scores": [0.6, 0.25]}).encode())


def job(**options: Any) -> Job:
    return structs.replace(Job("http", "127.0.0.1", 0, "", [], "scores", [SCORES], seconds=0.3), **options)


def loaded(handler: Handler, **options: Any) -> Result:
    """Return the result of a job on a small server."""

    async def measured() -> Result:
        async with answering(handler) as target:
            return await run(job(port=target.port, requests=[target.request(b"{}")], **options))

    return uvloop.run(measured())


def always(response: bytes, seconds: float = 0.0) -> Handler:
    async def handler(number: int) -> bytes:
        await asyncio.sleep(seconds)
        return response

    return handler


def alternating(*responses: bytes | None) -> Handler:
    async def handler(number: int) -> bytes | None:
        await asyncio.sleep(0.001)
        return responses[number % len(responses)]

    return handler


def test_closed_loop_counts_right_answers_after_the_warm_up() -> None:
    calls = 0

    async def handler(number: int) -> bytes:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        return FALSE if calls < 3 else (RIGHT, NEARLY)[calls % 2]

    result = loaded(handler, callers=3, warm_up=0.2)
    assert not result.failures
    assert 3 < result.answers == len(result.ordered_latencies()) < calls
    assert result.ordered_latencies()[0] >= 0.009


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (FALSE, WRONG),
        (reply(b"no JSON"), WRONG),
        (reply(b'{"scores": [0.5, NaN]}'), WRONG),
        (reply(b'{"error": "wait", "code": "overloaded"}', 503), "status 503 overloaded"),
        (None, "closed by the server"),
    ],
)
def test_fault_is_a_failure_and_no_answer(fault: bytes | None, reason: str) -> None:
    result = loaded(alternating(RIGHT, fault))
    assert result.failures.keys() == {reason} and result.failures[reason] > 0 < result.answers
    assert result.answers <= len(result.ordered_latencies())


def test_request_without_an_answer_is_a_failure_of_a_closed_loop() -> None:
    result = loaded(always(RIGHT, 5.0), callers=2)
    assert result.failures == {UNANSWERED: 2} and result.answers == 0


def test_open_loop_counts_from_the_due_time() -> None:
    """One connection takes 20 ms for a request, and ten times as many are due: each waits for all before it."""
    result = loaded(always(RIGHT, 0.02), rate=500, seconds=0.5)
    assert result.answers <= 26 < 150 < result.due
    assert result.ordered_latencies()[-1] > 0.3, "a request that was due in the first half is answered at the end or later"
    assert not result.failures, "a request that is only late has not failed"


def test_job_runs_in_a_process_and_measures_others() -> None:
    async def measured() -> Result:
        async with answering(alternating(RIGHT)) as target:
            return await asyncio.to_thread(
                run_in_process, job(port=target.port, requests=[target.request(b"{}")], pids=[os.getpid()])
            )

    result = asyncio.run(measured())
    assert result.answers > 0 and not result.failures
    assert result.cpu_seconds > 0 < result.server_cpu_seconds[0]


def test_generator_that_cannot_connect_reports_why() -> None:
    with pytest.raises(CannotMeasure, match="refused"):
        run_in_process(job(port=1, requests=[b"request"]))


def test_load_is_divided_among_generators() -> None:
    closed = divided(job(callers=5, seed=7), 2)
    assert [(each.callers, each.rate, each.seed) for each in closed] == [(3, 0, 7), (2, 0, 8)]
    assert [(each.callers, each.rate) for each in divided(job(callers=256, rate=90.0), 3)] == [(86, 30), (85, 30), (85, 30)]
    assert len(divided(job(callers=1), 4)) == 1


def test_results_of_generators_are_added() -> None:
    one = Result(2.0, 10, 8, array("d", [0.1, 0.3]).tobytes(), {"status 503": 2}, 1.0, [3.0, 5.0])
    other = Result(4.0, 1, 2, array("d", [0.2]).tobytes(), {"status 503": 1, "broken": 1}, 0.5, [5.0, 6.0])
    both = merged([one, other])
    assert (both.seconds, both.due, both.answers, both.cpu_seconds) == (3.0, 11, 10, 1.5)
    assert both.milliseconds() == pytest.approx({"p50_ms": 200, "p90_ms": 300, "p99_ms": 300})
    assert both.failures == {"status 503": 3, "broken": 1}
    assert both.server_cpu_seconds == [4.0, 5.5], "each generator measured the same server"
