"""Overload up to 20 times the capacity of a GPU. tests/long/test_overload.py does the same with a planted device."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import models
from tests.accumulator import at_rest
from tests.long.overload import SECONDS, Overload, staircase
from tests.serving import Server, serving

MODEL = "deep"
VOCABULARY = 12
LSTM = {"kind": "lstm", "hidden": 512, "depth": 8}
ROWS = 4
"""Few rows in a batch: its time hardly depends on them, and a small capacity lets the generator offer many times as much."""
BUDGET_MS = 5
CAPACITY = 300.0
"""About the requests per second that the device should answer. The length of a sequence follows from it."""
SHORT, LEAST_STEPS, MOST_STEPS = 200, 50, 1000
LEAST_BUSY = 0.8
STARTED_SECONDS = 3.0
"""After this time a generator has started and warmed up."""


def of_length(server: Server, steps: int) -> Overload:
    return Overload.of(server, "http", MODEL, [step % VOCABULARY for step in range(steps)])


def of_the_device(server: Server) -> Overload:
    """Return a load of sequences of one length, of which the device answers about CAPACITY per second."""
    of_short = of_length(server, SHORT).capacity(SECONDS / 4)
    return of_length(server, max(LEAST_STEPS, min(MOST_STEPS, round(SHORT * of_short / CAPACITY))))


def busy_share(overload: Overload) -> float:
    """Return the share of the time in which the device runs batches while callers wait for its answers."""

    def busy_seconds() -> float:
        return overload.server.metric("seqserve_device_busy_seconds_total")

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(overload.capacity, SECONDS)
        time.sleep(STARTED_SECONDS)
        before, began = busy_seconds(), time.monotonic()
        time.sleep(SECONDS / 2)
        share = (busy_seconds() - before) / (time.monotonic() - began)
        loading.result()
    return share


def test_goodput_holds_up_to_20_times_the_capacity_of_a_gpu(tmp_path: Path, show: Callable[[object], None]) -> None:
    root = tmp_path / "models"
    ids = models.IDS | {"vocabulary": VOCABULARY, "max_steps": MOST_STEPS}
    models.made_up(root, MODEL, ids, models.EMBEDDING, LSTM, head={"kind": "regress", "pool": "last", "outputs": 2})
    limits = {"max_batch_sequences": str(ROWS), "batch_budget_ms": str(BUDGET_MS), "frontends": "4", "idle_seconds": "600"}
    with serving(root, tmp_path, "--device", "cuda:0", **limits) as server:
        overload = of_the_device(server)
        share = busy_share(overload)
        show(f"the device is busy for {share:.0%} of the time")
        assert share > LEAST_BUSY, "the device is not the limit"
        before = at_rest(server)
        assert staircase(overload, show) == []
        at_rest(server).since(before).check()
