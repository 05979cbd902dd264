"""Drives a Ray cluster from tests: `ray_nodes` runs it in .venv-ray, because its requirements differ from the service's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from loadtest.servers import free_ports
from tests.serving import eventually

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
COMMAND = [sys.executable, "-m", "service", "serve"]
SETTINGS = {
    "SEQSERVE_DEVICE": "cpu",
    "SEQSERVE_FRONTENDS": "1",
    "SEQSERVE_INSECURE": "true",
    "SEQSERVE_ALLOWED_HOSTS": "*",
    "SEQSERVE_DEFAULT_DEADLINE_MS": "60000",
    "SEQSERVE_SESSION_IDLE_SECONDS": "600",
}
QUICK = {
    "command": COMMAND,
    "lame_duck_seconds": 2.0,
    "drain_seconds": 10.0,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 3.0,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2.0,
    "health_check_period_s": 1.0,
}
"""Options of the application whose delays suit a test."""


class RayCluster:
    """A Ray cluster with the service in it. url: of Serve's proxy, that of the second node if the head may end."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"

    def call(self, name: str, *arguments: Any) -> Any:
        """Run a command of `ray_nodes.Nodes` and return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the Ray cluster ended with {self._process.wait()}"
        return json.loads(line)

    def running(self) -> int:
        """Return the number of replicas that run."""
        count: int = self.call("replicas").get("RUNNING", 0)
        return count

    def await_running(self, count: int) -> None:
        eventually(lambda: self.running() == count, 120)


def environment(scratch: Path) -> dict[str, str]:
    """Return the variables of every process that uses Ray: its files, and this repository as the place of `deploy`."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # on a busy machine a proxy does not start within Ray's 5 s
    }


def lasting(redis: str, worker_port: int) -> dict[str, str]:
    """Return the variables with which a head keeps its state in Redis, and the other nodes wait for its return.

    worker_port: of Serve's proxy on the second node, which has the address of the first.
    """
    return {
        "RAY_REDIS_ADDRESS": urlsplit(redis).netloc,
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(worker_port),
    }


@contextmanager
def ray_cluster(
    models: Path, log: Path, settings: Mapping[str, str] = SETTINGS, redis: str = "", **options: Any
) -> Iterator[RayCluster]:
    """Run a cluster over a models folder until the end of the block. Then print its log, which pytest shows for a failed test.

    settings: of the servers; redis: URL of the server with the state of the head, which then may end; options: of the application.
    """
    if not PYTHON.exists():
        pytest.skip("Ray is missing: `make cluster-test` installs it into .venv-ray")
    port, worker_port = free_ports(2)
    variables = lasting(redis, worker_port) if redis else {}
    served = QUICK | {"settings": {**settings, "SEQSERVE_MODELS": str(models)}} | options
    arguments = json.dumps([port, bool(redis), served])
    # Ray's sockets have long names below this folder, and a socket's name has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as scratch, log.open("w") as errors:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "tests.cluster.ray_nodes", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=environment(Path(scratch)) | variables,
        )
        cluster = RayCluster(process, worker_port if redis else port)
        try:
            assert cluster.answer() == "ready"
            yield cluster
        finally:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait(60)
            process.stdout.close()
            print(log.read_text()[-5000:])


@contextmanager
def traffic(cluster: RayCluster, envoy: Path, folder: Path) -> Iterator[Path]:
    """Run the process that writes Envoy's endpoints. Yields Envoy's configuration when it is there."""
    with (folder / "traffic.log").open("w") as log:
        address = cluster.call("address")
        process = subprocess.Popen(
            [*(str(PYTHON), "-m", "deploy.ray.traffic", "--address", address), "--envoy", str(envoy), "--out", str(folder)],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=environment(folder),
        )
        try:
            yield eventually(lambda: (folder / "envoy.json").exists() and folder / "envoy.json")
        finally:
            process.terminate()
            process.wait(30)
            print((folder / "traffic.log").read_text())
