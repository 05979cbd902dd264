"""The supervisor is killed, and no process stays behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests import models
from tests.long.overload import LAGS, Lag
from tests.reloading import TEXT
from tests.serving import Server, alive, asking, descendants, eventually, serving

END_SECONDS = 2.0
REQUEST = {"model": "words", "inputs": [TEXT]}
FLAGS = ("--device", "cpu,cpu", "--frontends", "2")
NO_RECEIVER = "http://127.0.0.1:9"
"""The address for traces, so that there is a tracer. Nothing listens there."""


@contextmanager
def started(tmp_path: Path) -> Iterator[Server]:
    """A server with processes of every role. All of them are killed at the end of the test if the test has killed the supervisor."""
    models.words(tmp_path / "models")
    variables = {"trace_endpoint": NO_RECEIVER, "session_store": str(tmp_path / "sessions")}
    with serving(tmp_path / "models", tmp_path, *FLAGS, **variables) as server:
        # A large body starts a decoder, also if it is not valid.
        server.client.post("/infer", content=json.dumps(REQUEST | {"inputs": [5]}) + " " * (64 << 10))
        eventually(lambda: server.events("decoder started"))
        pids = descendants(server.process.pid)
        try:
            yield server
        finally:
            if server.process.poll() is not None:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def left_behind(server: Server, stopped: str = "") -> set[str]:
    """Kill the supervisor under load while a process is stopped, and return the names of the processes that do not end in time."""
    names = {event["pid"]: event["child"] for event in server.events("started")}
    decoders = {event["pid"]: "decoder" for event in server.events("decoder started")}
    pids = descendants(server.process.pid)
    roles = set(names.values())
    assert roles == {"engine-0", "engine-1", "frontend-0", "frontend-1", "tracer-0", "store-0"}
    assert len(pids) == len(roles) + len(decoders)
    with Lag() as lag:
        if stopped:
            os.kill(server.pid(stopped), signal.SIGSTOP)
        os.kill(server.process.pid, signal.SIGKILL)
        began = time.monotonic()
        server.process.wait()
        while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() - began < END_SECONDS + LAGS * lag.worst:
            time.sleep(0.01)
        seconds = time.monotonic() - began
    print(f"{seconds:.3f} s, lag {lag.worst:.3f} s")
    return {(names | decoders)[pid] for pid in left}


@pytest.mark.parametrize("stopped", ["", "engine-1", "frontend-0"])
def test_all_processes_end_within_two_seconds(stopped: str, tmp_path: Path) -> None:
    with started(tmp_path) as server, suppress(httpx.TransportError), asking(server, REQUEST, REQUEST):
        assert not left_behind(server, stopped)


def test_engine_that_is_starting_ends_too(tmp_path: Path) -> None:
    with started(tmp_path) as server:
        os.kill(server.pid("engine-0"), signal.SIGKILL)
        eventually(lambda: len([event for event in server.events("started") if event["child"] == "engine-0"]) == 2)
        eventually(lambda: imports_torch(server.pid("engine-0")))
        assert not left_behind(server)


def imports_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
