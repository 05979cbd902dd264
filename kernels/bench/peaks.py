"""The peaks of a CPU: the rate of multiply-adds, and the rates of reading arrays from its caches and from its memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from time import perf_counter

import torch

from kernels.cpu.target import host_target

ARRAYS = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 28)
"""Bytes of the arrays that are read. An LSTM of 512 units has a recurrent weight of 4 MiB; no cache holds the largest array."""
REPETITIONS = 1_000_000
"""Multiply-adds of each number in a run: some milliseconds."""
RUNS, QUICK_RUNS = 20, 5
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates of some threads together, in a microsecond: float32 multiply-adds, and bytes read by the bytes of the array."""

    multiply_adds_per_us: float
    read_bytes_per_us: dict[int, float]

    def read_rate(self, array_bytes: int) -> float:
        """Return the rate of the smallest measured array that is at least as large, or of the largest array."""
        larger = [size for size in self.read_bytes_per_us if size >= array_bytes]
        return self.read_bytes_per_us[min(larger, default=max(self.read_bytes_per_us))]

    def __str__(self) -> str:
        rates = [f"{rate / 1e3:.3g} GB/s of {_binary(size)}" for size, rate in self.read_bytes_per_us.items()]
        return f"peak FMA {self.multiply_adds_per_us / 1e3:.3g} G multiply-adds/s; memory read: {', '.join(rates)}"


def measured_peaks(threads: int, quick: bool = False) -> Peaks | None:
    """Return the peaks of `threads` threads, or None if compiled loops do not run on this machine."""
    if find_spec("numba") is None or host_target() is None:
        return None
    runs = QUICK_RUNS if quick else RUNS
    with ThreadPoolExecutor(threads) as pool:

        def shortest_us(part: Callable[[int], None]) -> float:
            """Return the time of the fastest run, in which each thread runs its part."""
            return min(_microseconds(lambda: list(pool.map(part, range(threads)))) for _ in range(1 + runs))

        numbers = torch.ones(max(ARRAYS) // FLOAT_BYTES)
        rates = {size: _read_rate(shortest_us, numbers[: size // FLOAT_BYTES], threads) for size in ARRAYS}
        return Peaks(_multiply_add_rate(shortest_us, threads), rates)


ShortestUs = Callable[[Callable[[int], None]], float]


def _multiply_add_rate(shortest_us: ShortestUs, threads: int) -> float:
    from kernels.bench.peak_loops import CHAIN_NUMBERS, multiply_adds

    # The numbers stay 1: a processor may be slower with numbers that are too small or too large.
    numbers = [torch.tensor([1.0] * CHAIN_NUMBERS + [0.5, 0.5]) for _ in range(threads)]
    us = shortest_us(lambda thread: multiply_adds(REPETITIONS, numbers[thread].data_ptr()))
    return threads * REPETITIONS * CHAIN_NUMBERS / us


def _read_rate(shortest_us: ShortestUs, array: torch.Tensor, threads: int) -> float:
    """Return the bytes in a microsecond. Each thread reads its part of the array, as often as the largest array takes."""
    from kernels.bench.peak_loops import PIECE, read

    pieces = len(array) // PIECE // threads
    repetitions = max(ARRAYS) // array.nbytes
    sums = torch.empty(threads, PIECE)

    def part(thread: int) -> None:
        read(repetitions, array[thread * pieces * PIECE :].data_ptr(), pieces, sums[thread].data_ptr())

    return threads * pieces * PIECE * FLOAT_BYTES * repetitions / shortest_us(part)


def _microseconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return (perf_counter() - start) * 1e6


def _binary(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
