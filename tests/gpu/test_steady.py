"""Mixed requests allocate no GPU memory, and no process grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mixed import ROUND, mixed, send
from tests.serving import Server, eventually, serving
from tests.steady import Sample, growing, growth, sample

MODELS = Path(__file__).resolve().parent.parent.parent / "models"
WARM_UP, ROUNDS = 100_000 // ROUND, 60_000 // ROUND
FRONTENDS, CLIENTS = 4, 128
MALLOCS, ALLOCATIONS = "seqserve_device_mallocs_total", "seqserve_device_allocations_total"
RESERVED = "seqserve_device_reserved_bytes"
PLAN_CACHE = "CUBLASLT_HEURISTICS_CACHE_CAPACITY"
"""cuBLASLt caches a plan for each size of a product, by default up to 8,192. Batches without a graph have many sizes."""


def device_metrics(server: Server, *names: str) -> dict[str, float]:
    return {name: server.metric(name) for name in names}


def test_load_allocates_no_device_memory_or_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of requests without options run as graphs, whose memory is part of the capture: they allocate no blocks at all."""
    monkeypatch.setenv(PLAN_CACHE, "64")
    with serving(MODELS, tmp_path, "--device", "cuda:0", "--frontends", str(FRONTENDS)) as server:
        eventually(lambda: all(device_metrics(server, MALLOCS, ALLOCATIONS, RESERVED).values()))
        requests, before = mixed(MODELS), device_metrics(server, MALLOCS, RESERVED)
        # With many clients and short batches, the pools of a process take long to reach their final size.
        send(server.address, requests, rounds=WARM_UP, callers=CLIENTS)
        found: list[dict[str, Sample]] = []
        send(
            server.address,
            requests,
            rounds=ROUNDS,
            callers=CLIENTS,
            after_round=lambda sent: found.append(sample(server, sent)),
        )
        assert device_metrics(server, MALLOCS, RESERVED) == before
        assert not growing(growth(found[len(found) // 2 :]))
        before = device_metrics(server, ALLOCATIONS)
        send(server.address, mixed(MODELS, varied=False), rounds=ROUNDS // 2, callers=CLIENTS)
        # On a busy GPU, some graphs are left out.
        assert device_metrics(server, ALLOCATIONS) == before or server.events("some batches run without a graph")
