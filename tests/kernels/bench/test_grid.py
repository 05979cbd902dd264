"""A run on a GPU holds every size that a goal speaks of, and times no more of each than the goals need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import kernels.sru
from kernels.backend import takes_everything
from kernels.bench import measure, timing
from kernels.bench.baselines.baseline import Call, Peer
from kernels.bench.given import Given, made_up
from kernels.bench.measure import Bench, Findings
from kernels.bench.timing import NotCapturableError, Spread
from kernels.bench.workload import FORMS, LONG_MEMORY, VOCABULARY, Workload
from kernels.bench.workloads import FOLDED_FORMS, workloads
from tests.kernels.bench.conftest import CPU, tiny

SIZES = (256, 512, 1024), (1, 32, 256)
STEPS = {"sru": (32, 128, 1024, 4096), "qrnn": (32, 128, 4096)}
IN_GRID = replace(tiny("sru", lengths="equal"), dtype="float16")


def sizes(family: str, kind: str, form: str) -> set[tuple[int, int, int]]:
    every = [one for one in workloads(family, "cuda", quick=False) if one.in_grid]
    return {(one.hidden, one.rows, one.steps) for one in every if (one.kind, one.form) == (kind, form)}


@pytest.mark.parametrize("family, form", [(family, form) for family in FORMS for form in FORMS[family]])
def test_every_form_is_timed_over_every_size(family: str, form: str) -> None:
    assert sizes(family, "layer", form) == set(product(*SIZES, STEPS[family]))


@pytest.mark.parametrize("family, form", [(family, form) for family in FORMS for form in FOLDED_FORMS[family]])
def test_folded_layers_are_timed_over_token_ids(family: str, form: str) -> None:
    assert sizes(family, "folded", form) == set(product(*SIZES, (32, 128, 4096)))
    ids = [one for one in workloads(family, "cuda", quick=False) if one.kind == "folded"]
    assert {one.inputs for one in ids} == {VOCABULARY} and {one.dtype for one in ids} == {"float16"}


def test_the_figure_s_sizes_and_one_long_memory_are_timed() -> None:
    for form in FORMS["sru"]:
        assert sizes("sru", "every-step", form) == {(hidden, 32, steps) for hidden in (256, 512) for steps in (32, 128)}
    assert sizes("sru", "layer", LONG_MEMORY) == {(512, 1, 4096)}


@pytest.mark.parametrize("family", FORMS)
def test_questions_float32_and_cpus_have_one_form_and_are_in_no_grid(family: str) -> None:
    on_cpu = workloads(family, "cpu", quick=False)
    beside = [one for one in workloads(family, "cuda", quick=False) if one.lengths == "questions" or one.dtype == "float32"]
    assert len(on_cpu) == 18 and len(beside) == 4
    for one in (*on_cpu, *beside):
        assert one.form == FORMS[family][-1] and not one.in_grid


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Workload, Peer], Findings]:
    """A bench that takes itself to be on a GPU, has last resorts alone, and can capture whoever answers something."""

    def captured(call: Callable[[], Any], check: Callable[[Any], object], budget_s: float) -> Spread:
        if call() is None:
            raise NotCapturableError("it waits for the device")
        return Spread(1.0, 1.0, 1.0, 10)

    last_resorts = tuple(one for one in kernels.sru.BACKENDS if one.refuses is takes_everything)
    monkeypatch.setattr(kernels.sru, "BACKENDS", last_resorts)
    monkeypatch.setattr(measure, "made_up", lambda workload, _: made_up(workload, CPU))
    monkeypatch.setattr(timing, "eager", lambda *_: Spread(9.0, 9.0, 9.0, 10))
    monkeypatch.setattr(timing, "kernel", captured)
    monkeypatch.setattr(timing, "replay", captured)

    def measured(workload: Workload, *peers: Peer) -> Findings:
        return Bench(torch.device("cuda"), peers, 0.0, lambda _: None).measured([workload])

    return measured


def twin(given: Given) -> Call:
    return Call(given.encoder("framework"))


def walking(given: Given) -> Call:
    """Whose run gives nothing, and whose answer is only computed when it is read."""
    encode = given.encoder("framework")
    return Call(lambda: None, lambda _: encode())


PEERS = Peer("twin", twin), Peer("walking", walking), Peer("elsewhere", twin, eager_only="it is launched elsewhere")


def timings(findings: Findings) -> list[tuple[str, str]]:
    assert not findings.wrong
    return [(row.backend, row.timing) for row in findings.rows if row.backend != "framework"]


def test_in_a_grid_one_time_is_enough(on_cuda: Callable[..., Findings]) -> None:
    findings = on_cuda(IN_GRID, *PEERS)
    assert timings(findings) == [("twin", "kernel"), ("walking", "eager"), ("elsewhere", "eager")]
    assert "walking is timed eagerly only: it waits for the device" in findings.left_out


def test_beside_a_grid_all_times_are_taken(on_cuda: Callable[..., Findings]) -> None:
    findings = on_cuda(replace(IN_GRID, lengths="questions"), *PEERS)
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
def test_a_last_resort_is_not_timed_on_the_large_sizes_of_a_grid(
    workload: Workload, timed: bool, on_cuda: Callable[..., Findings]
) -> None:
    findings = on_cuda(workload)
    assert {row.backend for row in findings.rows} == ({"framework"} if timed else set())
    assert any(line.startswith("framework is a last resort") for line in findings.left_out) is not timed
