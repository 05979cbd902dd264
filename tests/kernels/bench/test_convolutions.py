"""Every strategy for a convolution agrees, and its memory growth or factor error is recorded."""

from __future__ import annotations

import pytest
import torch

from kernels.bench.agreement import expected_answer
from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline
from kernels.bench.baselines.conv.low_rank import factorised, low_rank
from kernels.bench.baselines.conv.lowering import TILE, in_tiles, lowered, tap_by_tap
from kernels.bench.baselines.conv.winograd import winograd
from kernels.bench.case import random_case
from kernels.bench.report import FACTORS, MEMORY
from kernels.bench.workload import Workload
from tests.kernels.bench.conftest import CPU, measured, tiny

STRATEGIES = (
    *(each for each in BASELINES["conv"] if each.applies(tiny("conv", "text-cnn"), "cpu") and each.name != "direct loops"),
    Baseline("tap by tap", tap_by_tap),
)


def agrees(workload: Workload, baseline: Baseline, tolerance: float) -> None:
    findings = measured(workload, baseline)
    assert not findings.wrong and not findings.skipped
    assert findings.measurements[-1].backend == baseline.name and findings.measurements[-1].error < tolerance


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.name))
def test_partial_tiles_and_odd_row_lengths_agree(strategy: Baseline) -> None:
    odd = Workload("conv", 7, 2 * TILE // 7, 5, 9, kind="text-cnn")
    assert odd.rows * odd.steps > TILE and odd.rows * odd.steps % 2
    agrees(odd, strategy, 1e-5)


@pytest.mark.parametrize(
    "form, whole, tile, pairs",
    # 3 rows of 7 steps: a tile holds the 27 or 33 padded steps; Winograd has half as many pairs, of four arrays each.
    [("width 3", 3.0, 3 * 27 / 21, 4 * 14 / 21), ("width 5", 5.0, 5 * 33 / 21, 4 * 17 / 21)],
)
def test_memory_growth_is_recorded(form: str, whole: float, tile: float, pairs: float) -> None:
    case = random_case(tiny("conv", "dense-conv", "equal", form=form), CPU)
    growth = [build(case).extra[MEMORY] for build in (lowered, in_tiles, tap_by_tap, winograd)]
    assert growth == pytest.approx([whole, tile, 0.0, pairs])


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
