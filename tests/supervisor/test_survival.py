"""The service survives faults of its environment: a lost log, exhausted descriptors, a models folder that hangs, huge names."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from service.modeling import spec
from service.supervisor.repository import POLICY
from tests import models, planted
from tests.reloading import answered, load, unload
from tests.serving import Server, SharedServer, eventually, serving
from tests.supervisor.test_processes import start

PATIENT_SECONDS = 60
"""Deadline of steps that take a moment: the machine may be busy."""
LEAVE_SECONDS = 3.0
"""How long a client waits that leaves early. A busy service has read its request by then."""


def write_models(root: Path) -> None:
    models.words(root)
    models.sensors(root)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server and its models folder, in which every test restores the models."""
    folder = tmp_path_factory.mktemp("unharmed")
    write_models(folder / "models")
    with serving(folder / "models", folder) as server:
        yield server, folder / "models"


# Standard error.


@contextmanager
def running(folder: Path, stderr: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with this standard error, and its address."""
    command = [sys.executable, "-m", "service", "serve", "--models", str(folder), "--port", "0", "--grpc-port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "ready on" in line)
        yield server, line.split("ready on ")[1].split()[0]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(PATIENT_SECONDS)
        server.stdout and server.stdout.close()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def check_restart(server: subprocess.Popen[str], address: str) -> None:
    """End the frontend, which the supervisor logs, and wait until its successor serves."""

    def serves() -> bool:
        try:
            return httpx.get(f"{address}/readyz", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    before = children(server.pid)
    [frontend] = [child for child in before if b"service.frontend" in Path(f"/proc/{child}/cmdline").read_bytes()]
    os.kill(frontend, signal.SIGKILL)
    eventually(lambda: len(set(children(server.pid)) - set(before)) == 1, PATIENT_SECONDS)
    eventually(serves, PATIENT_SECONDS)
    assert server.poll() is None


def test_service_survives_a_full_disk_under_its_log(models_folder: Path) -> None:
    with Path("/dev/full").open("w") as full, running(models_folder, full.fileno()) as (server, address):
        check_restart(server, address)


def test_service_survives_the_end_of_its_log_s_reader(models_folder: Path) -> None:
    read_end, write_end = os.pipe()
    with running(models_folder, write_end) as (server, address):
        os.close(write_end)
        os.close(read_end)
        check_restart(server, address)


# File descriptors.


def test_restart_is_retried_while_descriptors_are_exhausted(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path) as server:
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        os.kill(server.pid("frontend-0"), signal.SIGKILL)
        failures = eventually(
            lambda: len(server.events("process not started")) > 2 and server.events("process not started"), 60
        )
        assert server.process.poll() is None
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
        eventually(server.ready, PATIENT_SECONDS)
        assert answered(server)[0] == "2"
    assert os.strerror(errno.EMFILE) in failures[0]["error"]
    assert failures[2]["retry_seconds"] > failures[0]["retry_seconds"], "it waits longer each time"


# Names.


def test_huge_model_name_is_refused_at_once(unharmed: tuple[Server, Path]) -> None:
    server, _ = unharmed
    with triton.InferenceServerClient(server.grpc) as client:
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="send a smaller message"):
                change("n" * (15 << 20), client_timeout=PATIENT_SECONDS)
            assert server.client.get("/metrics").status_code == 200
    load(server, "words")


# The models folder.


@pytest.fixture(scope="module")
def shared_stalling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SharedServer, Path]]:
    folder = tmp_path_factory.mktemp("stalling")
    write_models(folder / "models")
    with pytest.MonkeyPatch.context() as patch, closing(SharedServer(folder / "models", folder)) as shared:
        planted.plant("stalled-read", patch)
        yield shared, folder / "models" / "words" / "1" / planted.STALL


@pytest.fixture
def stalling(shared_stalling: tuple[SharedServer, Path]) -> Iterator[tuple[Server, Path]]:
    """A server, and a file: while it exists, reading the folder of the model `words` does not return."""
    shared, stall = shared_stalling
    with shared.lent() as server:
        yield server, stall
    stall.unlink(missing_ok=True)
    stall.with_name(planted.STALLED).unlink(missing_ok=True)


def test_fifo_in_the_models_folder_is_refused(unharmed: tuple[Server, Path]) -> None:
    server, root = unharmed
    for file in (root / spec.ALIASES, root / "words" / POLICY, root / "words" / "1" / spec.MODEL):
        kept = file.read_bytes() if file.exists() else None
        file.unlink(missing_ok=True)
        os.mkfifo(file)
        assert "not a regular file" in load(server, "words", status=400)["error"]
        file.unlink()
        if kept is not None:
            file.write_bytes(kept)
    load(server, "words")
    weights = root / "words" / "1" / spec.WEIGHTS
    kept = weights.read_bytes()
    weights.unlink()
    os.mkfifo(weights)
    assert "not a regular file" in load(server, "words", status=400)["error"]
    assert answered(server)[0] == "1"
    weights.unlink()
    weights.write_bytes(kept)


def test_hung_models_folder_delays_one_change_only(stalling: tuple[Server, Path]) -> None:
    server, stall = stalling
    stall.touch()
    refusal = load(server, "words", status=503)
    assert "did not answer" in refusal["error"]
    unload(server, "sensors")
    load(server, "sensors")
    assert answered(server)[0] == "1"
    stall.unlink()
    load(server, "words")


def test_load_whose_client_disconnects_is_cancelled(stalling: tuple[Server, Path]) -> None:
    server, stall = stalling
    gone, log_bytes = server.metric("seqserve_model_changes_total", outcome="client_gone"), server.log_bytes
    stall.touch()
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v2/repository/models/words/load", json={}, timeout=LEAVE_SECONDS)
    eventually(lambda: server.events("change cancelled", since=log_bytes), PATIENT_SECONDS)
    assert answered(server)[0] == "1"
    load(server, "sensors")
    assert server.metric("seqserve_model_changes_total", outcome="client_gone") == gone + 1


def change_and_leave(server: Server, protocol: str, change: str, model: str) -> None:
    """Ask for a change of a model, and leave before the reply."""
    if protocol == "http":
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(f"/v2/repository/models/{model}/{change}", json={}, timeout=LEAVE_SECONDS)
    else:
        with triton.InferenceServerClient(server.grpc) as client, pytest.raises(InferenceServerException, match="Deadline"):
            (client.load_model if change == "load" else client.unload_model)(model, client_timeout=LEAVE_SECONDS)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("change", ["load", "unload"])
def test_queued_change_whose_client_disconnects_is_cancelled(protocol: str, change: str, stalling: tuple[Server, Path]) -> None:
    """The change waits for another change, and has no effect afterwards."""
    server, stall = stalling
    log_bytes = server.log_bytes

    def changed(event: str) -> list[str]:
        return [entry["model"] for entry in server.events(event, since=log_bytes)]

    stall.touch()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(load, server, "words")
        eventually(stall.with_name(planted.STALLED).exists)
        change_and_leave(server, protocol, change, "sensors")
        eventually(lambda: changed("change cancelled") == ["sensors"])
        stall.unlink()
        first.result(PATIENT_SECONDS)
    load(server, "words")  # after every change before it
    assert set(changed("changed")) == {"words"}
    assert "sensors" in {model["name"] for model in server.client.get("/models").json()["models"]}


def test_sigterm_ends_a_service_whose_models_folder_hangs(stalling: tuple[Server, Path]) -> None:
    server, stall = stalling
    stall.touch()
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v2/repository/models/words/load", json={}, timeout=LEAVE_SECONDS)
    server.process.terminate()
    server.client.close()
    assert server.process.wait(PATIENT_SECONDS) == 0


def test_start_with_a_fifo_in_the_models_folder_names_it(tmp_path: Path) -> None:
    models.words(tmp_path)
    text = tmp_path / "words" / "1" / spec.MODEL
    text.unlink()
    os.mkfifo(text)
    ended = start(tmp_path)
    assert ended.returncode == 1
    assert spec.MODEL in ended.stderr and "not a regular file" in ended.stderr
