"""No number of strangers delays an innocent caller for long, whatever cheap bytes they send: the kinds of floods.py."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.frontend.guards.body_budget import MAX_RECEIVING_BYTES
from tests import models
from tests.long.floods import KINDS
from tests.serving import Server, serving
from tests.steady import processes, resident_bytes

SECONDS, PAUSE_SECONDS = 4.0, 0.005
MOST_P99_SECONDS = 0.5
"""Ten times the goal on two cores without other work: the flood has processes of its own, and a test machine may be busy."""
MOST_GROWTH_BYTES = MAX_RECEIVING_BYTES + (96 << 20)
"""What bodies on their way may hold, and a body of 16 MB that is joined, decoded and passed on."""
LARGE_STEPS, LARGE_WIDTH, MOST_STALL_SECONDS = 30_000, 384, 2.0
"""46 MB an answer. Twelve at once delayed others by 4 to 8 s when these waited behind them on the channel from the engine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    models.words(root)
    ids, embedding = {**models.IDS, "max_steps": LARGE_STEPS}, {**models.EMBEDDING, "width": LARGE_WIDTH}
    models.made_up(root, "wide", ids, embedding, head={"kind": "sequence"})
    with serving(root, tmp_path_factory.mktemp("server"), "--debug", frontends="1") as running:
        yield running


@pytest.mark.parametrize("connections", [50, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_innocent_caller_beside_a_flood(
    server: Server, kind: str, connections: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = [address.rpartition(":")[2] for address in (server.address, server.grpc)]
    before = sum(resident_bytes(pid) for pid in processes(server).values())
    command = [sys.executable, "-m", "tests.long.floods", kind, *ports, str(connections), str(SECONDS + 2)]
    with subprocess.Popen(command) as flood:
        time.sleep(2)
        seconds, until = [], time.monotonic() + SECONDS
        while time.monotonic() < until:
            began = time.perf_counter()
            assert server.infer("words", ["a b"]).status_code == 200
            seconds.append(time.perf_counter() - began)
            time.sleep(PAUSE_SECONDS)
        growth = sum(resident_bytes(pid) for pid in processes(server).values()) - before
        assert flood.wait() == 0
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    with capsys.disabled():
        figures = f"p50 {1000 * p50:.1f} ms, p99 {1000 * p99:.1f} ms, most {1000 * max(seconds):.0f} ms, {growth / 1e6:+.0f} MB"
        print(f"\n{kind}, {connections} connections: {figures} beside {len(seconds)} requests")
    assert p99 < MOST_P99_SECONDS and growth < MOST_GROWTH_BYTES


def test_innocent_caller_beside_large_answers(server: Server) -> None:
    tensor = {"name": "ids", "datatype": "INT32", "shape": [1, LARGE_STEPS], "data": [1] * LARGE_STEPS}
    body = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    with ThreadPoolExecutor(12) as pool:
        sent = [pool.submit(server.client.post, "/v2/models/wide/infer", json=body) for _ in range(12)]
        seconds = []
        while not all(reply.done() for reply in sent):
            began = time.perf_counter()
            assert server.infer("words", ["a b"]).status_code == 200
            seconds.append(time.perf_counter() - began)
            time.sleep(PAUSE_SECONDS)
        assert all(len(reply.result().content) > 4 * LARGE_STEPS * LARGE_WIDTH for reply in sent)
    assert max(seconds) < MOST_STALL_SECONDS
