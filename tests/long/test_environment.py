"""The service survives faults of its environment: exhausted descriptors, a full disk, no cache folder, and a wall clock that jumps."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from service.modeling import spec
from tests import models
from tests.accumulator import Account
from tests.long.environment import compiled, full_disk
from tests.raw_websocket import connection
from tests.reloading import TEXT, answered, load
from tests.serving import answering, check_unharmed, eventually, serving
from tests.steady import processes

BODY = {"model": "words", "inputs": [TEXT]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.words(tmp_path / "models")
    return tmp_path / "models"


def test_service_survives_without_descriptors(folder: Path, tmp_path: Path) -> None:
    """Few are enough for the service, and a restart is retried while there are none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with serving(folder, tmp_path) as server, ExitStack() as silent:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(260):
                silent.enter_context(connection(server))
            assert answered(server)[0] == "1" and server.client.get("/metrics").status_code == 200
            silent.close()
            limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
            os.kill(server.pid("frontend-0"), signal.SIGKILL)
            failures = eventually(lambda: len(found := server.events("process not started")) > 2 and found)
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
            eventually(server.ready)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.strerror(errno.EMFILE) in failures[0]["error"]
    assert failures[2]["retry_seconds"] > failures[0]["retry_seconds"], "it waits longer each time"


def test_requests_loads_and_traces_continue_after_a_full_disk(folder: Path, tmp_path: Path) -> None:
    """Loading a version writes nothing. A half-copied version is not visible, and a trace without room for its file fails alone."""
    weights = folder / "words" / "2" / spec.WEIGHTS
    with serving(folder, tmp_path, "--debug") as server:
        shutil.copytree(folder / "words" / "1", folder / "words" / "2")
        content = weights.read_bytes()
        with answering(server, BODY, BODY):
            with full_disk(processes(server).values()):
                load(server, "words")
                weights.write_bytes(content[: len(content) // 2])
                assert "2/" in load(server, "words", status=400)["error"]
                assert server.client.post("/debug/trace", params={"batches": 2}).status_code >= 500
                assert answered(server)[0] == "2"
            weights.write_bytes(content)
            load(server, "words")
            assert server.client.post("/debug/trace", params={"batches": 2}).status_code == 200
        assert server.events("log lines dropped")
        check_unharmed(server)


# The wall clock jumps by an hour and by a year, forwards and back.

HOUR, YEAR = 3600, 365 * 86_400
JUMPS = (HOUR, 0, -HOUR, YEAR, -YEAR, 0)
"""Seconds that the wall clock is ahead, in sequence."""
PAUSE_SECONDS = 2.5
"""Between two jumps: longer than the supervisor waits for a heartbeat."""


def test_jumps_of_the_wall_clock_change_no_session_and_no_process(tmp_path: Path) -> None:
    jump = tmp_path / "jump"
    jump.write_text("0")
    models.accumulator(tmp_path / "accumulators")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(compiled("wall_clock.c", tmp_path)))
            patch.setenv("CLOCK_JUMP", str(jump))
            server = stack.enter_context(serving(tmp_path / "accumulators", tmp_path, session_idle_seconds="60"))
        before = processes(server)
        assert server.infer("accumulator", [[2]], session="kept").status_code == 200
        with answering(server, {"model": "accumulator", "inputs": [[2, 2, 0]], "deadline_ms": 30_000}):
            for steps, seconds in enumerate(JUMPS, start=2):
                jump.write_text(str(seconds))
                time.sleep(PAUSE_SECONDS)
                reply = server.infer("accumulator", [[2]], session="kept", start=False)
                assert Account.told(reply.json()["outputs"][0]["value"]) == Account(steps, steps), seconds
        assert processes(server) == before
        jump.write_text(str(YEAR))
        assert server.infer("accumulator", [[2]]).status_code == 200
        ahead = server.metric("seqserve_last_answer_time_seconds") - datetime.now(UTC).timestamp()
        assert abs(ahead - YEAR) < HOUR, "the service has seen the jumps"
