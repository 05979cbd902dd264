"""The memory growth of a convolution's strategies and the error of its factors are recorded."""

from __future__ import annotations

import pytest
import torch

from kernels.bench.agreement import expected_answer
from kernels.bench.baselines.conv.low_rank import factorised, low_rank
from kernels.bench.baselines.conv.lowering import in_tiles, lowered, tap_by_tap
from kernels.bench.baselines.conv.winograd import winograd
from kernels.bench.case import random_case
from kernels.bench.report import FACTORS, MEMORY
from tests.kernels.bench.conftest import CPU, tiny


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
