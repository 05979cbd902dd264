"""Every strategy for a convolution agrees, and its memory growth or factor error is recorded."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kernels.bench.agreement import expected_answer
from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline
from kernels.bench.baselines.conv import direct
from kernels.bench.baselines.conv.low_rank import factorised, low_rank
from kernels.bench.baselines.conv.lowering import TILE, in_tiles, lowered, tap_by_tap
from kernels.bench.baselines.conv.winograd import winograd
from kernels.bench.case import random_case
from kernels.bench.report import FACTORS, MEMORY
from kernels.bench.workload import Workload
from kernels.launching import ceil_div
from tests.kernels.bench.conftest import CPU, OVER_VECTORS, measured, tiny
from tests.kernels.families import cpu_backends

STRATEGIES = (
    *(each for each in BASELINES["conv"] if each.applies(tiny("conv", "text-cnn"), "cpu") and each.name != "direct loops"),
    Baseline("tap by tap", tap_by_tap),
)


@pytest.fixture
def _plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace numba with a module that compiles nothing."""
    numba: Any = ModuleType("numba")
    numba.njit = lambda function: function
    monkeypatch.setattr(direct, "optional_package", lambda *_: numba)


def agrees(workload: Workload, baseline: Baseline, tolerance: float) -> None:
    findings = measured(workload, baseline)
    assert not findings.wrong and not findings.skipped
    assert findings.measurements[-1].backend == baseline.name and findings.measurements[-1].error < tolerance


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.name))
@pytest.mark.parametrize("workload", OVER_VECTORS, ids=str)
def test_every_strategy_agrees_in_float16(workload: Workload, strategy: Baseline) -> None:
    agrees(replace(workload, dtype="float16", inputs=24, hidden=24), strategy, 1e-2)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.name))
def test_partial_tiles_and_odd_row_lengths_agree(strategy: Baseline) -> None:
    odd = Workload("conv", 7, 2 * TILE // 7, 5, 9, kind="text-cnn")
    assert odd.rows * odd.steps > TILE and odd.rows * odd.steps % 2
    agrees(odd, strategy, 1e-5)


@pytest.mark.parametrize("workload", OVER_VECTORS, ids=str)
def test_plain_loops_agree(workload: Workload, _plain_loops: None) -> None:
    agrees(workload, Baseline("direct loops", direct.loops_on_cpu), 1e-5)


def test_compiled_loops_agree() -> None:
    pytest.importorskip("numba")
    agrees(tiny("conv", "text-cnn"), Baseline("direct loops", direct.loops_on_cpu), 1e-5)


@pytest.mark.parametrize("build, install", [(direct.loops_on_cpu, "install numba"), (direct.loops_on_cuda, "install cupy")])
def test_loops_name_their_missing_compiler(build: Any, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> None:
        raise ImportError(f"No module named {package!r}")

    monkeypatch.setattr("kernels.bench.baselines.baseline.import_module", missing)
    (line,) = measured(tiny("conv", "text-cnn"), Baseline("direct loops", build)).skipped
    assert line.startswith(f"direct loops is skipped: {install}")


class FakeKernel:
    """Computes what the threads of the kernel compute, from the same addresses."""

    def launch(self, blocks: tuple[int, int, int], shared: int, members: list[int]) -> None:
        *addresses, windows, depth, inputs, outputs = members
        assert blocks == (ceil_div(windows * outputs, direct.THREADS), 1, 1) and shared == 0
        sizes = (windows - 1) * inputs + depth, depth * outputs, outputs, windows * outputs
        seen, filters, bias, answers = (
            np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))
            for size, address in zip(sizes, addresses, strict=True)
        )
        for at in range(windows * outputs):
            window, output = divmod(at, outputs)
            begin = window * inputs
            answers[at] = bias[output] + seen[begin : begin + depth] @ filters[output::outputs]


@pytest.mark.parametrize("workload", OVER_VECTORS, ids=str)
def test_cuda_loops_get_the_addresses_of_their_arrays(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "optional_package", lambda *_: None)
    monkeypatch.setattr(direct, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(direct, "load_kernel", lambda *_, **__: FakeKernel())
    agrees(workload, Baseline("direct loops", direct.loops_on_cuda), 1e-5)


@pytest.mark.parametrize(
    "form, whole, tile, pairs",
    # 3 rows of 7 steps: a tile holds the 27 or 33 padded steps; Winograd has half as many pairs, of four arrays each.
    [("width 3", 3.0, 3 * 27 / 21, 4 * 14 / 21), ("width 5", 5.0, 5 * 33 / 21, 4 * 17 / 21)],
)
def test_memory_growth_is_recorded(form: str, whole: float, tile: float, pairs: float) -> None:
    case = random_case(tiny("conv", "dense-conv", "equal", form=form), CPU)
    growth = [build(case).extra[MEMORY] for build in (lowered, in_tiles, tap_by_tap, winograd)]
    assert growth == pytest.approx([whole, tile, 0.0, pairs])


def test_extra_values_are_in_the_measurement() -> None:
    findings = measured(tiny("conv", "dense-conv", "equal"), Baseline("im2col", lowered), Baseline("low rank", low_rank))
    assert [set(one.extra) for one in findings.measurements] == [*[set()] * len(cpu_backends("conv")), {MEMORY}, {FACTORS}]


def test_factors_have_at_most_half_of_the_parameters() -> None:
    filters = torch.randn(5, 12, 16)
    first, second = factorised(filters)
    assert first.shape == (5, 12, 6) and second.shape == (6, 16)
    assert filters.numel() // 2 - (5 * 12 + 16) < first.numel() + second.numel() <= filters.numel() // 2


def test_factors_of_full_rank_filters_have_their_own_answer() -> None:
    case = random_case(tiny("conv", "text-cnn"), CPU)
    call, true = low_rank(case), expected_answer(case)
    assert call.expected is not None and call.expected.error(call.run()) < 1e-5
    assert float((call.expected.values - true.values).abs().max()) > 0.01
    assert 0.1 < call.extra[FACTORS] < 1
