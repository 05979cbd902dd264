"""Processes that are killed, that hang, and that end with a model: what is left, and who is answered."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from service.engine.known_answers import CHECK_SECONDS
from service.frontend.grpc.routes import STREAM_PATH
from service.supervisor.trials import MAX_ENDS
from tests import models, planted
from tests.frontend.http2 import peer
from tests.long.fuzz.traffic import frames_of
from tests.long.overload import LAGS, Lag
from tests.planted import DEADLY_MODEL
from tests.reloading import TEXT, answered, load
from tests.serving import LIMIT_SECONDS, Server, alive, answering, asking, descendants, eventually, serving

END_SECONDS = 2.0
RESTARTS_SECONDS = 300.0
"""Longest time of some restarts of engines, on a busy machine."""
REQUEST = {"model": "words", "inputs": [TEXT], "deadline_ms": 60_000}
PAIRS = ("--device", "cpu,cpu", "--frontends", "2")
NO_RECEIVER = "http://127.0.0.1:9"
"""The address for traces, so that there is a tracer. Nothing listens there."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of models with words."""
    models.words(tmp_path / "models")
    return tmp_path / "models"


# The supervisor and frontends are killed.


@contextmanager
def whole(folder: Path, scratch: Path) -> Iterator[Server]:
    """A server with processes of every role. All of them are killed at the end, also if the test has killed the supervisor."""
    variables = {"trace_endpoint": NO_RECEIVER, "session_store": str(scratch / "sessions")}
    with serving(folder, scratch, *PAIRS, **variables) as server:
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


@pytest.mark.parametrize("stopped", ["", "engine-1", "frontend-0"])
def test_killed_supervisor_leaves_no_process_behind(stopped: str, folder: Path, tmp_path: Path) -> None:
    with whole(folder, tmp_path) as server, suppress(httpx.TransportError), asking(server, REQUEST, REQUEST):
        names = {
            event["pid"]: event.get("child", "decoder")
            for name in ("started", "decoder started")
            for event in server.events(name)
        }
        pids = descendants(server.process.pid)
        assert sorted(names[pid] for pid in pids) == [
            *("decoder", "engine-0", "engine-1", "frontend-0", "frontend-1", "store-0", "tracer-0")
        ]
        with Lag() as lag:
            if stopped:
                os.kill(server.pid(stopped), signal.SIGSTOP)
            os.kill(server.process.pid, signal.SIGKILL)
            began = time.monotonic()
            server.process.wait()
            while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() - began < END_SECONDS + LAGS * lag.worst:
                time.sleep(0.01)
        assert [names[pid] for pid in left] == []


def test_connections_are_spread_and_a_frontend_that_hangs_or_ended_holds_none(folder: Path, tmp_path: Path) -> None:
    hello = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    count = 64
    with serving(folder, tmp_path, "--frontends", "4", idle_seconds="600") as server, ExitStack() as clients:
        host, _, number = server.address.removeprefix("http://").rpartition(":")

        def connect() -> None:
            client = clients.enter_context(closing(socket.create_connection((host, int(number)), LIMIT_SECONDS)))
            client.sendall(hello)
            assert client.recv(1 << 16)

        def accepted(pid: int) -> int:
            lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
            sockets = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(f":{int(number):04X}") and line[3] == "01"}
            return len(sockets & {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()})

        for _ in range(count):
            connect()
        spread = [accepted(server.pid(f"frontend-{place}")) for place in range(4)]
        assert count <= sum(spread) <= count + 1 and max(spread) <= 3 * count / 4, spread
        hanging, ended = server.pid("frontend-0"), server.pid("frontend-1")
        os.kill(hanging, signal.SIGSTOP)
        os.kill(ended, signal.SIGKILL)
        for _ in range(count):
            connect()
        os.kill(hanging, signal.SIGCONT)
        eventually(lambda: server.pid("frontend-1") != ended)


# Engines that hang, that compute wrong numbers, and that end with a model.


def test_stopped_processes_are_noticed_and_replaced(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, *PAIRS) as server:
        for role in ("engine", "frontend"):
            stopped = server.pid(f"{role}-1")
            os.kill(stopped, signal.SIGSTOP)
            eventually(lambda stopped=stopped, role=role: not alive(stopped) and server.pid(f"{role}-1") != stopped)  # type: ignore[misc]
            eventually(lambda role=role: server.metric("seqserve_process_restarts_total", process=role, reason="hung") == 1)  # type: ignore[misc]
            assert answered(server)[0] == "1"


def test_engine_that_computes_other_numbers_is_replaced(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "damaged"
    monkeypatch.setenv("DAMAGED", str(damaged))
    planted.plant("damaged", monkeypatch)
    with serving(folder, tmp_path, "--device", "cpu") as server:
        before, right = server.pid("engine-0"), answered(server)[1]
        assert server.metric("seqserve_batch_sequences_count") == 1, "known answers are not counted"
        time.sleep(1.5 * CHECK_SECONDS)  # until the engine has noted its first answer
        damaged.touch()
        assert answered(server)[1] != right
        [lost] = eventually(lambda: server.events("device lost"), 3 * CHECK_SECONDS)
        damaged.unlink()
        eventually(lambda: server.pid("engine-0") != before and server.ready(), 120.0)
        assert answered(server)[1] == right and "words version 1 gives another answer" in lost["error"]


@pytest.fixture
def deadly(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that tells which work with the model DEADLY_MODEL ends an engine; empty, so the model is harmless."""
    file = tmp_path / "deadly"
    file.touch()
    monkeypatch.setenv("DEADLY", str(file))
    planted.plant("deadly", monkeypatch)
    models.words(folder, DEADLY_MODEL)
    return file


def ends(server: Server) -> list[list[str]]:
    """Return the trials of each engine that ended."""
    return [event.get("on_trial", []) for event in server.events("child ended") if event["child"].startswith("engine")]


def test_model_that_ends_engines_becomes_unavailable_and_the_other_is_served(
    deadly: Path, folder: Path, tmp_path: Path
) -> None:
    """No request for the other model fails. After a repair the model is loaded again."""

    def reason() -> str:
        listed = httpx.get(f"{server.address}/models", timeout=60, trust_env=False).json()
        return "".join(entry["reason"] for entry in listed["unavailable"] if entry["name"] == DEADLY_MODEL)

    with serving(folder, tmp_path, *PAIRS) as server:
        deadly.write_text("batch")
        with answering(server, REQUEST, REQUEST), asking(server, REQUEST | {"model": DEADLY_MODEL}) as replies:
            eventually(lambda: reason() or len(ends(server)) > MAX_ENDS, RESTARTS_SECONDS)
        assert reason() == f"{MAX_ENDS} engines in a row ended while they loaded this version or ran its first batch"
        assert ends(server) == [[f"{DEADLY_MODEL}/1"]] * MAX_ENDS and {reply.status_code for reply in replies} == {503}
        refused = server.infer(DEADLY_MODEL, [TEXT])
        assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
        [indexed] = [row for row in server.client.post("/v2/repository/index").json() if row["name"] == DEADLY_MODEL]
        assert (indexed["state"], indexed["reason"]) == ("UNAVAILABLE", reason())
        eventually(server.ready)
        deadly.write_text("")
        load(server, DEADLY_MODEL)
        assert not reason() and server.infer(DEADLY_MODEL, [TEXT]).status_code == 200
        assert server.metric("seqserve_requests_total", model="words", outcome="engine_lost") == 0


def test_service_runs_without_what_only_linux_has(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, loads a new version of a model, and restarts an engine that died."""
    planted.plant("portable", monkeypatch)
    with serving(folder, tmp_path, "--device", "cpu") as server:
        models.words(folder, version=2, seed=2)
        load(server, "words")
        killed = server.pid("engine-0")
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: server.pid("engine-0") != killed and server.ready())
        assert answered(server)[0] == "2"


# Clients that have gone without closing their connections: the pings of the service find them.


def test_grpc_client_that_answers_no_ping_is_closed_within_80_seconds(folder: Path, tmp_path: Path) -> None:
    """Its stream is open, and nothing of it arrives any more. The limits are applied every second."""
    with serving(folder, tmp_path) as server, Lag() as lag:
        host, _, port = server.grpc.rpartition(":")
        fields = ((b"te", b"trailers"), (b"content-type", b"application/grpc"))
        opened = peer.frame(peer.HEADERS, peer.END_HEADERS, 1, peer.block(*fields, path=STREAM_PATH.encode()))
        with socket.create_connection((host, int(port)), 800) as dead:
            began, received = time.monotonic(), b""
            dead.sendall(peer.PREFACE + peer.settings() + opened)
            with suppress(ConnectionError):
                while part := dead.recv(1 << 16):
                    received += part
            seconds = time.monotonic() - began
    assert [frame.payload for frame in frames_of(received) if frame.kind == peer.PING] == [b"are you?"]
    assert seconds <= 82 + LAGS * lag.worst
