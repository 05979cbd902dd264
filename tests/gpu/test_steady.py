"""What 100,000 requests of many kinds ask of a GPU's memory, and leave on the host: nothing that was not there before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mixed import ROUND, mixed, plain, send
from tests.serving import Server, eventually, serving
from tests.steady import Memory, growing

MODELS = Path(__file__).resolve().parent.parent.parent / "models"
WARM_UP, ROUNDS = 150_000 // ROUND, 100_000 // ROUND
FRONTS, CALLERS = 4, 128
MALLOCS, ALLOCATIONS = "seqserve_device_mallocs_total", "seqserve_device_allocations_total"
RESERVED = "seqserve_device_reserved_bytes"
FEW_PLANS = {"CUBLASLT_HEURISTICS_CACHE_CAPACITY": "64"}
"""Turns without a graph are of all sizes, and the library keeps a plan for each size of a product that it has met: 8,192 of them, which are
some MiB, unless it is told otherwise."""


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded models on a GPU, with what the device was asked for until they were ready."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in FEW_PLANS.items():
            patched.setenv(name, value)
        scratch = tmp_path_factory.mktemp("log")
        with serving(MODELS, scratch, "--device", "cuda:0", "--frontends", str(FRONTS)) as server:
            eventually(lambda: all(server.metric(name) > 0 for name in (MALLOCS, ALLOCATIONS, RESERVED)), within_seconds=10)
            yield server


def asked_of_device(server: Server, *names: str) -> dict[str, float]:
    return {name: server.metric(name) for name in names}


def test_no_request_asks_the_device_for_memory_and_no_process_grows(on_gpu: Server) -> None:
    requests, before = mixed(MODELS), asked_of_device(on_gpu, MALLOCS, RESERVED)
    # With so many callers, and turns that take no time, the pools of a process take longer to be as large as they will be.
    send(on_gpu.address, requests, rounds=WARM_UP, callers=CALLERS)
    memory = Memory(on_gpu)
    send(on_gpu.address, requests, rounds=ROUNDS, callers=CALLERS, after_round=memory.sample)
    assert asked_of_device(on_gpu, MALLOCS, RESERVED) == before
    assert not growing(memory.slopes())


def test_no_plain_request_asks_the_allocator_for_memory(on_gpu: Server) -> None:
    """Its turn is a graph, captured in memory of its own."""
    before = asked_of_device(on_gpu, ALLOCATIONS)
    send(on_gpu.address, plain(MODELS), rounds=ROUNDS, callers=CALLERS)
    assert asked_of_device(on_gpu, ALLOCATIONS) == before
