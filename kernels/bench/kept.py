"""Chooses the measurements of a run that results/ keeps: goals derive their values from them, or results/README.md quotes them."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.bench.goals import goals_for
from kernels.bench.goals.evaluation import Times
from kernels.bench.report import Measurement
from kernels.bench.workload import IDS

WIDE = (768, 1024, 2048)
"""Hidden units of the layers for which the README compares the wide kernel with the grid kernel."""


def kept(measurements: Sequence[Measurement], backends: Sequence[str], device: str, threads: int | None) -> list[Measurement]:
    """Return some of the measurements. backends: as for `goals.table`; device: cpu or cuda."""
    times = Times(measurements, backends)
    for goal in goals_for(device, threads):
        goal.values(times)
    return [one for one in measurements if times.has_used(one) or (device == "cuda" and _is_quoted_on_cuda(one))]


def _is_quoted_on_cuda(one: Measurement) -> bool:
    work, ours = one.workload, one.backend in ("persistent", "fused")
    if work.dtype != "float16":
        return False
    if work.family == "conv":
        if one.timing == "kernel":
            return ours or one.backend == "torch conv1d"
        return ours and work.kind in IDS
    if work.kind != "layer" or work.lengths != "equal":
        return False
    if one.timing == "kernel":
        return one.backend in ("wide", "grid") and work.hidden in WIDE and work.rows >= 64
    called = work.family == "gru" and one.timing == "eager" and (ours or one.backend == "framework")
    return called and work.rows <= 32 and work.hidden <= 1024
