"""`python -m kernels.bench ladder [--device cpu|cuda:0] [--quick] [--out DIR]`: a table and records of the ladder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kernels.bench.ladder import report
from kernels.bench.ladder.climb import Climb, climb, product_rate, workload_for
from kernels.bench.ladder.rungs import RUNGS
from kernels.bench.report import Setting
from kernels.bench.tables import write_results

DTYPES = {"cuda": ("float16", "float32"), "cpu": ("float32",)}
"""A CPU computes in float32."""
BUDGETS_S = {"cuda": 0.25, "cpu": 0.3}
"""Seconds for each time. A quick run has a fifth."""


def run(device: torch.device, quick: bool, setting: Setting, out: Path | None, progress: Callable[[str], None]) -> int:
    """Print the ladder, and write it if there is a folder. Returns 1 if a rung disagreed with the reference or failed."""
    budget_s = BUDGETS_S[device.type] / (5 if quick else 1)
    climbs = []
    for dtype in DTYPES[device.type]:
        result = climb(workload_for(device.type, dtype, quick), RUNGS, device, budget_s, progress)
        climbs.append(replace(result, peak=product_rate(device, dtype, budget_s)))
    text = _text(climbs, setting)
    print(f"\n{text}")
    records = [record for result in climbs for record in report.records(result, setting)]
    write_results(out, setting.file_name("ladder"), records, text, ending="")
    return 1 if any(result.wrong for result in climbs) else 0


def _text(climbs: list[Climb], setting: Setting) -> str:
    parts = [f"ladder on {setting}", report.TIMES, *map(report.table, climbs)]
    lines = dict.fromkeys(line for result in climbs for line in (*result.skipped, *(f"WRONG: {each}" for each in result.wrong)))
    return "\n\n".join([*parts, "\n".join(lines)] if lines else parts) + "\n"
