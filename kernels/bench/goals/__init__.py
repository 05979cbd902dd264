"""Whether our kernels on a GPU are as fast as they should be: what a run found beside what is wanted, a line each.

A goal is met, missed, or open: some of its workloads were not timed, and those that were do not miss it. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kernels.bench.goals.common import Times
from kernels.bench.goals.conv import table as of_convolutions
from kernels.bench.goals.lstm import table as of_lstm
from kernels.bench.goals.scan import table as of_scans
from kernels.bench.report import Row


def table(rows: Iterable[Row], backends: Sequence[str]) -> str:
    """Empty without a figure that a goal speaks of. backends: the names of ours, in the order in which they are chosen."""
    times = Times(rows, backends)
    return of_lstm(times) or of_scans(times) or of_convolutions(times)
