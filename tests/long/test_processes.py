"""What takes longer than `tests/supervisor/test_processes.py`, with its service: engines end, and models are replaced."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from service.modeling import spec
from tests import models
from tests.planted import Gate
from tests.reloading import answered, load
from tests.serving import Server, eventually
from tests.supervisor.test_processes import (
    QUICK,
    Reloaded,
    ask,
    in_flight,
    refused,
    reloaded,
    restarts,
    started,
    summed,
    two_engines,
)

__all__ = ["reloaded", "started", "two_engines"]


def scores(response: httpx.Response) -> dict[str, float]:
    """Return the scores of one sequence; the last digits depend on where it was cut into chunks."""
    outputs: list[dict[str, dict[str, float]]] = response.json()["outputs"]
    return outputs[0]["scores"]


def test_request_that_ended_two_engines_is_refused_and_others_are_answered(two_engines: Server, gate: Gate) -> None:
    """Each engine has a request. While both engines restart, requests are refused."""
    before = restarts(two_engines, "engine")
    undisturbed = scores(ask(two_engines, QUICK))
    with ThreadPoolExecutor() as pool:
        gate.let(0)
        requests = in_flight(two_engines, pool, 2)
        os.kill(two_engines.pid("engine-0"), signal.SIGKILL)
        eventually(lambda: two_engines.metric("seqserve_rerun_total") == 1)
        assert two_engines.ready(), "the other engine serves"
        os.kill(two_engines.pid("engine-1"), signal.SIGKILL)
        eventually(lambda: not two_engines.ready())
        refused = ask(two_engines, QUICK)
        assert two_engines.client.get("/healthz").status_code == 200
        gate.open()
        replies = sorted((request.result() for request in requests), key=lambda reply: reply.status_code)
    for reply in (refused, replies[1]):
        assert (reply.status_code, reply.json()["code"]) == (503, "engine_lost")
    assert int(refused.headers["retry-after"]) >= 1 and "not sent to a third" in replies[1].json()["error"]
    assert scores(replies[0]) == pytest.approx(undisturbed, abs=1e-5)
    eventually(lambda: restarts(two_engines, "engine") == before + 2)


def test_restarted_processes_leave_out_a_model_whose_files_were_overwritten(reloaded: Reloaded) -> None:
    """The processes that have read the files compute with what they have read."""
    server, root, _ = reloaded
    before = answered(server)
    with (root / "words" / "1" / spec.WEIGHTS).open("r+b") as weights:
        weights.seek(-64, os.SEEK_END)
        weights.write(bytes(64))
    (root / "words" / "1" / spec.TOKENIZER).write_bytes(b"")
    assert answered(server) == before
    for child in ("engine-0", "engine-1", "frontend-0"):
        kill(server, child)
    eventually(lambda: server.infer("accumulator", [[2]], session="s").status_code == 200)
    assert summed(server, [1], "s") == ("1", 2)
    assert "words version 1 cannot be served" in refused(server, 503, "unavailable", "words")
    models.words(root)
    load(server, "words")
    assert answered(server) == before


def kill(server: Server, child: str) -> None:
    """Kill a process and wait until its successor serves."""
    before = len(server.events("started"))
    os.kill(server.pid(child), signal.SIGKILL)
    eventually(lambda: len(server.events("started")) > before and server.ready())
