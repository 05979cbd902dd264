"""Overload up to 20 times the capacity of a GPU. tests/long/test_overload.py does the same with a planted device and with a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.accumulator import at_rest
from tests.long.overload import LEAST_BUSY, computed, of_capacity, staircase
from tests.serving import serving

LSTM = {"kind": "lstm", "hidden": 512, "depth": 8}
ROWS = 4
"""Few rows in a batch: its time hardly depends on them, and a small capacity lets the generator offer many times as much."""
BUDGET_MS = 5
CAPACITY = 300.0


def test_goodput_holds_up_to_20_times_the_capacity_of_a_gpu(tmp_path: Path, show: Callable[[object], None]) -> None:
    model = computed(tmp_path / "models", LSTM)
    limits = {"max_batch_sequences": str(ROWS), "batch_budget_ms": str(BUDGET_MS), "frontends": "4", "idle_seconds": "600"}
    with serving(tmp_path / "models", tmp_path, "--device", "cuda:0", **limits) as server:
        overload = of_capacity(server, model, CAPACITY)
        share = overload.busy_share()
        show(f"the device is busy for {share:.0%} of the time")
        assert share > LEAST_BUSY, "the device is not the limit"
        before = at_rest(server)
        assert staircase(overload, show) == []
        at_rest(server).since(before).check()
