"""How much of a device's rate a convolution uses: its multiplications by the second, over those of one large product in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernels.bench.report import SHARE, Row
from kernels.bench.workload import EMBEDDED, STACKS, TEXT_CNNS, Workload


def multiplications(workload: Workload) -> int | None:
    """Of the windows that come out; None where it is not said how many there are: rows of a table are added, and of a stack's last step
    only some windows are needed."""
    if workload.kind == "product":
        return workload.steps * workload.inputs * workload.hidden
    if (
        workload.family != "conv"
        or workload.kind == "tcn-last"
        or (workload.kind == "text-cnn-ids" and workload.form != EMBEDDED)
    ):
        return None
    return sum(_windows(workload, width) * width for width in workload.widths) * workload.inputs * workload.outputs


def shares(rows: Sequence[Row]) -> list[Row]:
    """The same rows, those of convolutions with their share; the rate is that of a product in the same dtype, timed in the same way."""
    products = [row for row in rows if row.workload.kind == "product"]
    rates = {(row.workload.dtype, row.timing): _rate(row) for row in products}

    def shared(row: Row) -> Row:
        rate, of_product = _rate(row), rates.get((row.workload.dtype, row.timing))
        if row.workload.kind == "product" or rate is None or of_product is None:
            return row
        return replace(row, extra={**row.extra, SHARE: round(rate / of_product, 5)})

    return [shared(row) for row in rows]


def _rate(row: Row) -> float | None:
    """Multiplications in a microsecond."""
    many = multiplications(row.workload)
    return None if many is None else many / row.spread.median_us


def _windows(workload: Workload, width: int) -> int:
    """Of a text CNN those that are whole, else one for each step, of all layers."""
    beyond = width - 1 if workload.kind in TEXT_CNNS else 0
    layers = workload.layers if workload.kind in STACKS else 1
    return layers * sum(max(steps - beyond, 0) for steps in workload.row_lengths())
