"""Shares of the speed of the device: of its measured peaks on a CPU, of the rate of one large product on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kernels.bench.peaks import Peaks
from kernels.bench.report import FMA_SHARE, PRODUCT_SHARE, READ_SHARE, Measurement
from kernels.bench.work import multiplications, weights_read
from kernels.bench.workload import Workload


class Bound(NamedTuple):
    """A time that no backend can fall below. share: the name of the share of this time in a measured time."""

    least_us: float
    share: str


def bound(workload: Workload, peaks: Peaks) -> Bound:
    """Return the larger of the times of the multiplications and of reading the weights, each at its measured peak."""
    multiplying = multiplications(workload) / peaks.multiply_adds_per_us
    reading = sum(array.times * array.array_bytes / peaks.read_rate(array.array_bytes) for array in weights_read(workload))
    return max(Bound(multiplying, FMA_SHARE), Bound(reading, READ_SHARE))


def with_shares_of_peaks(measurements: Sequence[Measurement], peaks: Peaks) -> list[Measurement]:
    """Add the share of the bound of its workload to each measurement."""

    def with_share(one: Measurement) -> Measurement:
        least_us, share = bound(one.workload, peaks)
        return replace(one, shares={share: round(least_us / one.spread.median_us, 5)})

    return [with_share(one) for one in measurements]


def with_shares_of_product(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Add the share to convolutions, relative to a product with the same dtype and timing."""
    products = [one for one in measurements if one.workload.kind == "product"]
    rates = {(one.workload.dtype, one.timing): _rate(one) for one in products}

    def with_share(one: Measurement) -> Measurement:
        of_product = rates.get((one.workload.dtype, one.timing))
        if one.workload.family != "conv" or one.workload.kind == "product" or of_product is None:
            return one
        rate = _rate(one)
        return replace(one, shares={PRODUCT_SHARE: round(rate / of_product, 5)}) if rate else one

    return [with_share(one) for one in measurements]


def _rate(one: Measurement) -> float:
    """Return the multiplications in a microsecond."""
    return multiplications(one.workload) / one.spread.median_us
