"""The service survives faults of its environment: stopped processes, exhausted descriptors, a full disk, no cache folder."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from kernels.folder import CACHE
from service.modeling import spec
from tests import models
from tests.long.environment import full_disk
from tests.planted import constants
from tests.raw_websocket import connection
from tests.reloading import answered, load
from tests.serving import Server, alive, answering, check_unharmed, eventually, serving
from tests.steady import processes

BODY = {"model": "words", "inputs": ["how far is the sea ?"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server and its models folder."""
    scratch = tmp_path_factory.mktemp("served")
    models.words(scratch / "models")
    flags = ("--debug", "--device", "cpu,cpu", "--frontends", "2")
    with serving(scratch / "models", scratch, *flags) as server:
        yield server, scratch / "models"


@pytest.mark.parametrize("name", ["engine-1", "frontend-1"])
def test_stopped_process_is_noticed_and_replaced(name: str, served: tuple[Server, Path]) -> None:
    server, _ = served
    stopped, version = server.pid(name), answered(server)[0]
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: not alive(stopped) and server.pid(name) != stopped)
    eventually(lambda: server.metric("seqserve_process_restarts_total", process=name.partition("-")[0], reason="hung") == 1)
    assert answered(server)[0] == version


def test_restart_is_retried_while_descriptors_are_exhausted(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path) as server:
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        os.kill(server.pid("frontend-0"), signal.SIGKILL)
        failures = eventually(lambda: len(found := server.events("process not started")) > 2 and found)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
        eventually(server.ready)
        assert answered(server)[0] == "2"
    assert os.strerror(errno.EMFILE) in failures[0]["error"]
    assert failures[2]["retry_seconds"] > failures[0]["retry_seconds"], "it waits longer each time"


def test_requests_loads_and_traces_continue_after_a_full_disk(served: tuple[Server, Path]) -> None:
    """Loading a version writes nothing. A half-copied version is not visible, and a trace without room for its file fails alone."""
    server, root = served
    shutil.copytree(root / "words" / "1", root / "words" / "2")
    content = (root / "words" / "1" / spec.WEIGHTS).read_bytes()
    with answering(server, BODY, BODY):
        with full_disk(processes(server).values()):
            load(server, "words")
            assert answered(server)[0] == "2"
            (root / "words" / "2" / spec.WEIGHTS).write_bytes(content[: len(content) // 2])
            assert "2/" in load(server, "words", status=400)["error"]
            assert server.client.post("/debug/trace", params={"batches": 2}).status_code >= 500
            assert answered(server)[0] == "2"
        (root / "words" / "2" / spec.WEIGHTS).write_bytes(content)
        load(server, "words")
        assert server.client.post("/debug/trace", params={"batches": 2}).status_code == 200
    assert server.events("log lines dropped")
    check_unharmed(server)


def test_service_without_a_cache_folder_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is in the path of the folder. Models run without compiled code, and the log has a warning."""
    models.words(tmp_path / "models")
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    with serving(tmp_path / "models", tmp_path, "--device", "cpu") as server:
        assert answered(server)[0] == "1"
        [warning] = server.events("cpu kernels not compiled")
        assert "cannot be written" in warning["reason"]


def test_huge_model_name_is_refused_at_once(served: tuple[Server, Path]) -> None:
    with triton.InferenceServerClient(served[0].grpc) as client:
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="send a smaller message"):
                change("n" * (15 << 20), client_timeout=60)


def test_polled_folder_is_served_as_it_changes(tmp_path: Path) -> None:
    polling = {"service.supervisor.reload.POLL_SECONDS": 0.1}
    models.words(tmp_path / "models")
    with constants(polling), serving(tmp_path / "models", tmp_path, reload="poll", versions="latest") as server:
        models.words(tmp_path / "models", version=2, seed=2)
        eventually(lambda: answered(server)[0] == "2")
        shutil.rmtree(tmp_path / "models" / "words" / "2")
        eventually(lambda: answered(server)[0] == "1")
        shutil.rmtree(tmp_path / "models" / "words")
        eventually(lambda: httpx.get(f"{server.address}/models", trust_env=False).json()["models"] == [])


def test_few_open_files_are_enough_for_the_service(models_folder: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with serving(models_folder, tmp_path) as server, ExitStack() as silent:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(260):
                silent.enter_context(connection(server))
            assert server.infer("words", ["how far"]).status_code == 200
            assert server.client.get("/metrics").status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
