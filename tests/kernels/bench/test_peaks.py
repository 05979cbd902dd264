"""The peaks of a CPU come from the fastest runs of compiled loops, which compute the claimed results."""

from __future__ import annotations

import pytest
import torch

from kernels.bench import peaks
from kernels.bench.peaks import Peaks, measured_peaks
from kernels.cpu.target import host_target

compiled = pytest.mark.skipif(host_target() is None, reason="compiled loops do not run on this processor")
RATES = Peaks(58_400.0, {1 << 18: 109_000.0, 1 << 20: 89_000.0, 1 << 28: 28_500.0})


@pytest.mark.parametrize(
    "array_bytes, rate",
    [(1, 109_000.0), (1 << 18, 109_000.0), ((1 << 18) + 1, 89_000.0), (1 << 28, 28_500.0), (1 << 30, 28_500.0)],
)
def test_array_is_read_like_the_next_larger_one(array_bytes: int, rate: float) -> None:
    assert RATES.read_rate(array_bytes) == rate


def test_peaks_are_printed_with_their_units() -> None:
    assert str(RATES) == (
        "peak FMA 58.4 G multiply-adds/s; memory read: 109 GB/s of 256 KiB, 89 GB/s of 1 MiB, 28.5 GB/s of 256 MiB"
    )


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


@compiled
@pytest.mark.parametrize("threads", [1, 2])
def test_fastest_run_counts(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [9.0, 5.0, 4.0, 4.5, 8.0, 7.0] * 3

    def microseconds(run: object) -> float:
        assert callable(run)
        run()
        return durations.pop()

    monkeypatch.setattr(peaks, "ARRAYS", (1 << 14, 1 << 16))
    monkeypatch.setattr(peaks, "REPETITIONS", 10)
    monkeypatch.setattr(peaks, "_microseconds", microseconds)
    measured = measured_peaks(threads, quick=True)
    from kernels.bench.peak_loops import CHAIN_NUMBERS

    # Each run reads 64 KiB: the smaller array four times.
    assert measured == Peaks(threads * 10 * CHAIN_NUMBERS / 4, {1 << 14: (1 << 16) / 4, 1 << 16: (1 << 16) / 4})
    assert not durations


def test_other_processors_have_no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "host_target", lambda: None)
    assert measured_peaks(1) is None
