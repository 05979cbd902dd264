"""Triton's client libraries for HTTP and gRPC send 100,000 requests each: neither a client nor the service grows by more than 1 MiB.

The project has no client library. Users of the Open Inference Protocol have these libraries.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import models
from tests.serving import Server, serving
from tests.steady import WARM_UP, Memory, Sample, steady

pytest.importorskip("tritonclient", reason="tritonclient is missing")

REQUESTS = 100_000
"""Requests of each client after the warm-up."""
TRANSPORTS = ("http", "grpc")
MOST_MIB = 1.0
"""Growth of a process in 100,000 requests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models.accumulator(root)
    return root


def calling(server: Server, transport: str, requests: int) -> Iterator[Sample]:
    """Run a client. Yields how many requests it has sent, and its memory after them."""
    address = urlsplit(server.address).netloc if transport == "http" else server.grpc
    command = [sys.executable, "-m", "tests.long.triton_caller", transport, address, str(requests)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        for line in client.stdout:
            sent, held = map(int, line.split())
            yield sent, held
    assert client.returncode == 0


def growth(server: Server, requests: int) -> dict[str, float]:
    """Return the MiB by which each client and each process of the server grows in 100,000 requests of a client."""
    memory = Memory(server)

    def samples(transport: str) -> list[Sample]:
        found = []
        for sent, held in calling(server, transport, requests):
            found.append((sent, held))
            if transport == TRANSPORTS[0]:
                memory.sample(sent)
        return found

    with ThreadPoolExecutor() as pool:
        of_clients = dict(zip(TRANSPORTS, pool.map(samples, TRANSPORTS), strict=True))
    return {f"{name} client": steady(found) for name, found in of_clients.items()} | memory.slopes()


def test_100_000_requests_of_each_library_grow_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(folder, tmp_path) as server:
        grown = growth(server, WARM_UP + REQUESTS)
    with capsys.disabled():
        print("\nMiB in 100,000 requests:", ", ".join(f"{name} {size:.2f}" for name, size in grown.items()))
    assert {name: size for name, size in grown.items() if size > MOST_MIB} == {}
