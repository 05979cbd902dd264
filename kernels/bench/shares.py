"""The rate of a convolution as a share of the rate of one large product in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernels.bench.report import SHARE, Measurement
from kernels.bench.workload import EMBEDDED, STACKS, TEXT_CNNS, Workload


def multiplications(workload: Workload) -> int | None:
    """Return the multiplications for all windows in the output.

    None: the number depends on the backend, as with tables (rows are added) and with the last step of a stack.
    """
    if workload.kind == "product":
        return workload.steps * workload.inputs * workload.hidden
    if (
        workload.family != "conv"
        or workload.kind == "tcn-last"
        or (workload.kind == "text-cnn-ids" and workload.form != EMBEDDED)
    ):
        return None
    return sum(_windows(workload, width) * width for width in workload.widths) * workload.inputs * workload.outputs


def with_shares(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Add the share to convolutions, relative to a product with the same dtype and timing."""
    products = [one for one in measurements if one.workload.kind == "product"]
    rates = {(one.workload.dtype, one.timing): _rate(one) for one in products}

    def with_share(one: Measurement) -> Measurement:
        rate, of_product = _rate(one), rates.get((one.workload.dtype, one.timing))
        if one.workload.kind == "product" or rate is None or of_product is None:
            return one
        return replace(one, extra={**one.extra, SHARE: round(rate / of_product, 5)})

    return [with_share(one) for one in measurements]


def _rate(one: Measurement) -> float | None:
    """Return the multiplications in a microsecond."""
    count = multiplications(one.workload)
    return None if count is None else count / one.spread.median_us


def _windows(workload: Workload, width: int) -> int:
    """Return the number of windows of all layers. In a text CNN only whole windows count."""
    beyond = width - 1 if workload.kind in TEXT_CNNS else 0
    layers = workload.layers if workload.kind in STACKS else 1
    return layers * sum(max(steps - beyond, 0) for steps in workload.row_lengths())
