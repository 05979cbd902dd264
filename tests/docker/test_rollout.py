"""A rolling update of three containers with the options, probes and times of the Helm chart, behind HAProxy and under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
import tritonclient.grpc
from tritonclient.grpc import InferInput

from loadtest.servers import free_ports
from service.settings import Settings
from tests.docker.pods import Docker, Proxy, Rollout, repeating
from tests.docker.stack import Stack, missing
from tests.long.kubernetes.tools import render

HOSTS = tuple(f"127.0.0.{number}" for number in range(12, 18))
QUESTION = "How far is it from Denver to Aspen ?"
VALUES: dict[str, Any] = {"access": {"insecure": True}, "replicas": 3, "settings": {"default_deadline_ms": 60000}}
"""Deadlines that a busy machine meets too."""


@pytest.fixture(scope="module")
def docker() -> Docker:
    """The docker command, on an engine that has the image."""
    if reason := missing():
        pytest.exit(reason, returncode=1)
    stack = Stack.made_up()
    stack.compose("build", "service")
    assert stack.config()["services"]["service"]["image"] == "seqserve:cpu"
    return stack.docker


def http_client(stack: ExitStack, port: int) -> Callable[[], object]:
    """Return a function that sends requests over a kept-alive connection."""
    client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False))

    def ask() -> None:
        answer = client.post("/infer", json={"model": "question-type", "inputs": [QUESTION]})
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}"

    return ask


def grpc_client(stack: ExitStack, port: int) -> Callable[[], object]:
    client = stack.enter_context(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}"))
    text = InferInput("text", [1], "BYTES")
    text.set_data_from_numpy(numpy.array([QUESTION.encode()], object))
    return lambda: client.infer("question-type", [text], client_timeout=30)


@contextmanager
def rolled_out(docker: Docker, scratch: Path, replicas: int, **values: Any) -> Iterator[tuple[Rollout, Proxy]]:
    """Start replicas of the chart behind a proxy."""
    [deployment] = [each for each in render({"test": {**VALUES, **values}})["test"]["objects"] if each["kind"] == "Deployment"]
    pod_http, pod_grpc, http, grpc = free_ports(4, "0.0.0.0")
    proxy = Proxy(HOSTS, (pod_http, pod_grpc), (http, grpc), scratch)
    rollout = Rollout(docker, deployment, HOSTS, (pod_http, pod_grpc), proxy)
    try:
        for _ in range(replicas):
            rollout.start()
        yield rollout, proxy
    finally:
        rollout.close()
        proxy.close()


def test_rolling_update_fails_no_request(docker: Docker, tmp_path: Path) -> None:
    """Over HTTP and gRPC, through a proxy that repeats nothing and learns late which pods close."""
    with ExitStack() as stack, rolled_out(docker, tmp_path, VALUES["replicas"]) as (rollout, proxy):
        clients = [http_client(stack, proxy.http) for _ in range(6)] + [grpc_client(stack, proxy.grpc) for _ in range(2)]
        with repeating(*clients) as (successes, failures):
            rollout.replace_all()
        print(f"{len(successes)} requests; stops took {[round(took, 1) for _, took in rollout.stopped]} s")
        assert failures == [] and successes
        assert [status for status, _ in rollout.stopped] == [0] * VALUES["replicas"]
        assert all(took < Settings().lame_duck_seconds + Settings().drain_seconds for _, took in rollout.stopped)
