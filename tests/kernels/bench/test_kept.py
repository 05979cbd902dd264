"""The goals can be evaluated again from the results that the repository keeps."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kernels.bench import goals
from kernels.bench.kept import kept
from kernels.bench.report import Measurement
from kernels.bench.tables import RESULTS
from kernels.bench.timing import Spread
from kernels.bench.workload import ENCODER, Workload
from kernels.bench.workloads import FAMILIES, STEPS

MOST_BYTES = 1_300_000
FILES = sorted(path for path in RESULTS.glob("*.jsonl") if path.name.partition("-")[0] in FAMILIES)


def read(path: Path) -> tuple[list[Measurement], dict[str, Any]]:
    """Return the measurements in a file, and what `kept` needs besides."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    threads = records[0].get("threads")
    backends = [backend.name for backend in import_module(f"kernels.{records[0]['family']}").BACKENDS]
    device = "cuda" if threads is None else "cpu"
    return list(map(measurement, records)), {"backends": backends, "device": device, "threads": threads}


def measurement(record: dict[str, Any]) -> Measurement:
    equal, encoder = record["lengths"] == "equal", record["workload"] == ENCODER
    workload = Workload(
        *(record["family"], record["rows"], record["steps"] if equal else STEPS, record["input"], record["hidden"]),
        *(record["lengths"], record["dtype"], record["workload"], record["form"]),
        *(record["layers"] if encoder else 1, record["directions"]),
    )
    spread = Spread(*(record[name] for name in ("median_us", "p10_us", "p90_us", "repetitions")))
    return Measurement(workload, record["backend"], record["timing"], spread, record["error"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_goals_are_evaluated_from_kept_results(path: Path) -> None:
    measurements, run = read(path)
    evaluated = goals.table(goals.goals_for(run["device"], run["threads"]), measurements, run["backends"])
    assert path.with_name(f"{path.stem}-goals.txt").read_text().partition("\n\n")[2].strip() == evaluated
    assert kept(measurements, **run) == measurements


def test_other_results_are_not_kept() -> None:
    measurements, run = read(RESULTS / "lstm-h200.jsonl")
    other = Measurement(measurements[0].workload, "torch by step", "replay", measurements[0].spread, 0.0)
    assert other not in kept([*measurements, other], **run)


def test_results_stay_small() -> None:
    assert sum(path.stat().st_size for path in RESULTS.iterdir()) <= MOST_BYTES
