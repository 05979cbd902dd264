"""Mixed requests allocate no GPU memory, and no process grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mixed import ROUND, mixed, plain, send
from tests.serving import Server, eventually, serving
from tests.steady import Memory, growing

MODELS = Path(__file__).resolve().parent.parent.parent / "models"
WARM_UP, ROUNDS = 100_000 // ROUND, 60_000 // ROUND
FRONTENDS, CLIENTS = 4, 128
MALLOCS, ALLOCATIONS = "seqserve_device_mallocs_total", "seqserve_device_allocations_total"
RESERVED = "seqserve_device_reserved_bytes"
SMALL_PLAN_CACHE = {"CUBLASLT_HEURISTICS_CACHE_CAPACITY": "64"}
"""cuBLASLt caches a plan for each size of a product, by default up to 8,192 plans, which take some MiB.
Batches without a graph have many sizes."""


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the embedded models on a GPU, once the metrics of its memory are known."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in SMALL_PLAN_CACHE.items():
            patched.setenv(name, value)
        scratch = tmp_path_factory.mktemp("log")
        with serving(MODELS, scratch, "--device", "cuda:0", "--frontends", str(FRONTENDS)) as server:
            eventually(lambda: all(server.metric(name) > 0 for name in (MALLOCS, ALLOCATIONS, RESERVED)), within_seconds=10)
            yield server


def device_metrics(server: Server, *names: str) -> dict[str, float]:
    return {name: server.metric(name) for name in names}


def test_mixed_load_allocates_no_device_memory_or_host_memory(on_gpu: Server) -> None:
    requests, before = mixed(MODELS), device_metrics(on_gpu, MALLOCS, RESERVED)
    # With many clients and short batches, the pools of a process take long to reach their final size.
    send(on_gpu.address, requests, rounds=WARM_UP, callers=CLIENTS)
    memory = Memory(on_gpu)
    send(on_gpu.address, requests, rounds=ROUNDS, callers=CLIENTS, after_round=memory.sample)
    assert device_metrics(on_gpu, MALLOCS, RESERVED) == before
    assert not growing(memory.slopes())


def test_plain_requests_allocate_no_device_blocks(on_gpu: Server) -> None:
    """Their batches run as graphs, whose memory is part of the capture."""
    before = device_metrics(on_gpu, ALLOCATIONS)
    send(on_gpu.address, plain(MODELS), rounds=ROUNDS, callers=CLIENTS)
    assert device_metrics(on_gpu, ALLOCATIONS) == before
