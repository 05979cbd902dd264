"""The bench of the kernels with every baseline that is installed, on small workloads, and its goals for the kept results."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.bench import goals
from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline
from kernels.bench.baselines.comparison import first_sru_package
from kernels.bench.convolutions import IDS_FORMS
from kernels.bench.kept import kept
from kernels.bench.ladder.climb import climb
from kernels.bench.ladder.rungs import RUNGS
from kernels.bench.report import Measurement
from kernels.bench.tables import RESULTS
from kernels.bench.timing import Spread
from kernels.bench.workload import ENCODER, FORMS, STACKS, Workload
from kernels.bench.workloads import FAMILIES, STEPS
from tests.kernels.bench.test_bench import measured, tiny

LENGTHS = ("equal", "questions")
WORKLOADS = [
    *(tiny(family, lengths=lengths) for family in ("lstm", "gru", "sru", "qrnn") for lengths in LENGTHS),
    *(tiny(family, "folded") for family in ("lstm", "gru")),
    *(tiny("conv", kind, lengths) for kind in ("text-cnn", "dense-conv", *STACKS) for lengths in LENGTHS),
    *(tiny("conv", "text-cnn-ids", lengths, form=form) for form in IDS_FORMS for lengths in LENGTHS),
    *(Workload(family, 3, 7, 5, 6, kind=ENCODER, depth=2, directions=2) for family in ("lstm", "gru")),
]
FILES = sorted(path for path in RESULTS.glob("*.jsonl") if path.name.partition("-")[0] in FAMILIES)


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_every_baseline_agrees(workload: Workload) -> None:
    """The `sru` package compiles at its first use."""
    findings = measured(workload, *(each for each in BASELINES[workload.family] if each.applies(workload, "cpu")))
    assert not findings.wrong
    assert all(one.error < 1e-5 for one in findings.measurements)


@pytest.mark.parametrize("form", FORMS["sru"])
def test_sru_package_runs_both_forms(form: str) -> None:
    findings = measured(tiny("sru", form=form), next(each for each in BASELINES["sru"] if each.name == "sru package"))
    assert not findings.wrong
    assert findings.skipped or findings.measurements[-1].error < 1e-5


def test_sru_package_runs_v1_for_a_qrnn() -> None:
    findings = measured(tiny("qrnn"), Baseline("sru package v1", first_sru_package))
    assert not findings.wrong
    assert findings.skipped or findings.measurements[-1].error < 1e-5


def test_rungs_of_a_cpu_agree_and_the_others_are_skipped() -> None:
    stack = Workload("lstm", 3, 12, 5, 6, kind=ENCODER, depth=3)  # the last group of steps is shorter than the others
    result = climb(stack, RUNGS, torch.device("cpu"), 0.0, lambda _: None)
    assert not result.wrong and [step.rung.number for step in result.steps] == [1, 2, 5, 6, 8, 10]
    assert all(step.error < 1e-5 for step in result.steps)
    assert [line.split()[0] for line in result.skipped] == ["3", "4", "7", "9"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_goals_are_evaluated_from_kept_results(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    threads, measurements = records[0].get("threads"), list(map(measurement, records))
    backends = [backend.name for backend in import_module(f"kernels.{records[0]['family']}").BACKENDS]
    device = "cuda" if threads is None else "cpu"
    evaluated = goals.table(goals.goals_for(device, threads), measurements, backends)
    assert path.with_name(f"{path.stem}-goals.txt").read_text().partition("\n\n")[2].strip() == evaluated
    assert kept(measurements, backends=backends, device=device, threads=threads) == measurements


def measurement(record: dict[str, Any]) -> Measurement:
    equal, encoder = record["lengths"] == "equal", record["workload"] == ENCODER
    workload = Workload(
        *(record["family"], record["rows"], record["steps"] if equal else STEPS, record["input"], record["hidden"]),
        *(record["lengths"], record["dtype"], record["workload"], record["form"]),
        *(record["layers"] if encoder else 1, record["directions"]),
    )
    spread = Spread(*(record[name] for name in ("median_us", "p10_us", "p90_us", "repetitions")))
    return Measurement(workload, record["backend"], record["timing"], spread, record["error"])
