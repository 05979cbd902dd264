"""A run on a GPU has every size of the goals, and only the timings that the goals need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.sru
from kernels.backend import accepts_everything, only_by_name
from kernels.bench import measure, timing
from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline, TimedCall
from kernels.bench.case import BenchCase, random_case
from kernels.bench.measure import Bench, Findings
from kernels.bench.timing import NotCapturableError, Spread
from kernels.bench.workload import Workload
from kernels.bench.workloads import FOLDED_FORMS, workloads
from tests.kernels.bench.conftest import CPU, tiny

IN_GRID = replace(tiny("sru", lengths="equal"), dtype="float16")


@pytest.mark.parametrize("family", FOLDED_FORMS)
def test_folded_layers_have_a_baseline_on_a_cpu(family: str) -> None:
    folded = [workload for workload in workloads(family, "cpu", quick=False) if workload.kind == "folded"]
    assert len(folded) == 18
    for workload in folded:
        (baseline,) = (baseline for baseline in BASELINES[family] if baseline.applies(workload, "cpu"))
        assert baseline.over_ids and baseline.name.startswith("embedding, ")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Workload, Baseline], Findings]:
    """Return a bench that behaves as on a GPU, has only last-resort backends, and captures every call with an answer."""

    def captured(call: Callable[[], Any], check: Callable[[Any], object], budget_s: float) -> Spread:
        if call() is None:
            raise NotCapturableError("it waits for the device")
        return Spread(1.0, 1.0, 1.0, 10)

    last_resorts = tuple(each for each in kernels.sru.BACKENDS if each.refuses in (accepts_everything, only_by_name))
    monkeypatch.setattr(kernels.sru, "BACKENDS", last_resorts)
    monkeypatch.setattr(measure, "random_case", lambda workload, _: random_case(workload, CPU))
    monkeypatch.setattr(timing, "eager", lambda *_: Spread(9.0, 9.0, 9.0, 10))
    monkeypatch.setattr(timing, "kernel", captured)
    monkeypatch.setattr(timing, "replay", captured)

    def measured(workload: Workload, *baselines: Baseline) -> Findings:
        return Bench(torch.device("cuda"), baselines, 0.0, lambda _: None).measured([workload])

    return measured


def twin(case: BenchCase) -> TimedCall:
    return TimedCall(case.encoder("framework"))


def walking(case: BenchCase) -> TimedCall:
    """A call that computes its answer only when it is read."""
    encode = case.encoder("framework")
    return TimedCall(lambda: None, lambda _: encode())


CONTENDERS = (
    Baseline("twin", twin),
    Baseline("walking", walking),
    Baseline("elsewhere", twin, eager_only="it is launched elsewhere"),
)


def timings(findings: Findings) -> list[tuple[str, str]]:
    assert not findings.wrong
    return [(one.backend, one.timing) for one in findings.measurements if one.backend != "framework"]


def test_one_timing_is_enough_in_a_grid(on_cuda: Callable[..., Findings]) -> None:
    findings = on_cuda(IN_GRID, *CONTENDERS)
    assert timings(findings) == [("twin", "kernel"), ("walking", "eager"), ("elsewhere", "eager")]
    assert "walking has eager times only: it waits for the device" in findings.skipped


def test_all_timings_are_taken_outside_the_grid(on_cuda: Callable[..., Findings]) -> None:
    findings = on_cuda(replace(IN_GRID, lengths="questions"), *CONTENDERS)
    all_times = [("twin", "eager"), ("twin", "kernel"), ("twin", "replay")]
    assert timings(findings) == [*all_times, ("walking", "eager"), ("elsewhere", "eager")]


@pytest.mark.parametrize(
    "workload, timed",
    [
        (replace(IN_GRID, steps=128), True),
        (replace(IN_GRID, steps=129), False),
        (replace(IN_GRID, rows=33), False),
        (replace(IN_GRID, rows=33, dtype="float32"), True),
        (replace(IN_GRID, rows=33, lengths="questions"), True),
    ],
    ids=str,
)
def test_last_resort_is_not_timed_on_large_sizes_of_a_grid(
    workload: Workload, timed: bool, on_cuda: Callable[..., Findings]
) -> None:
    findings = on_cuda(workload)
    assert {one.backend for one in findings.measurements} == ({"framework"} if timed else set())
    assert any(line.startswith("framework is the last resort") for line in findings.skipped) is not timed
