"""Overload up to 20 times the capacity of a GPU. tests/long/test_overload.py does the same with a planted device and with a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.long.overload import check_computed

LSTM = {"kind": "lstm", "hidden": 512, "depth": 8}
ROWS = 4
"""Few rows in a batch: its time hardly depends on them, and a small capacity lets the generator offer many times as much."""
BUDGET_MS = 5
CAPACITY = 300.0


def test_goodput_holds_up_to_20_times_the_capacity_of_a_gpu(tmp_path: Path, show: Callable[[object], None]) -> None:
    limits = {"max_batch_sequences": str(ROWS), "batch_budget_ms": str(BUDGET_MS), "frontends": "4", "idle_seconds": "600"}
    check_computed(LSTM, CAPACITY, tmp_path, show, "--device", "cuda:0", **limits)
