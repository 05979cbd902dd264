"""The compiled loops that measure the peaks of a CPU compute the claimed results."""

from __future__ import annotations

import pytest
import torch

from kernels.bench.peaks import Peaks
from kernels.cpu.target import host_target

compiled = pytest.mark.skipif(host_target() is None, reason="compiled loops do not run on this processor")
RATES = Peaks(58_400.0, {1 << 18: 109_000.0, 1 << 20: 89_000.0, 1 << 28: 28_500.0})


@pytest.mark.parametrize(
    "array_bytes, rate",
    [(1, 109_000.0), (1 << 18, 109_000.0), ((1 << 18) + 1, 89_000.0), (1 << 28, 28_500.0), (1 << 30, 28_500.0)],
)
def test_array_is_read_like_the_next_larger_one(array_bytes: int, rate: float) -> None:
    assert RATES.read_rate(array_bytes) == rate


@compiled
def test_loop_multiplies_and_adds_every_number() -> None:
    from kernels.bench.peak_loops import CHAIN_NUMBERS, multiply_adds

    start = torch.arange(CHAIN_NUMBERS, dtype=torch.float32)
    numbers = torch.cat((start, torch.tensor([0.5, 3.0])))
    multiply_adds(3, numbers.data_ptr())
    # 3 times x -> x / 2 + 3, which is exact.
    assert numbers[:-2].tolist() == (start / 8 + 3 * (1 + 0.5 + 0.25)).tolist()
    assert numbers[-2:].tolist() == [0.5, 3.0]


@compiled
def test_loop_reads_every_number() -> None:
    from kernels.bench.peak_loops import PIECE, read

    numbers = torch.arange(3 * PIECE + 5, dtype=torch.float32)
    sums = torch.full((PIECE + 1,), -1.0)
    read(2, numbers.data_ptr(), 3, sums.data_ptr())
    assert sums[:PIECE].tolist() == (2 * numbers[: 3 * PIECE].view(3, PIECE).sum(0)).tolist()
    assert sums[PIECE] == -1
