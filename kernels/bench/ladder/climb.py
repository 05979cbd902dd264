"""Runs the rungs in one dtype: each is checked against the reference, then timed as a call and as a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels.bench import timing
from kernels.bench.agreement import ExpectedAnswer, expected_answer
from kernels.bench.baselines.baseline import Baseline
from kernels.bench.baselines.comparison import square_product
from kernels.bench.case import BenchCase, random_case
from kernels.bench.convolutions import PRODUCT
from kernels.bench.ladder.rungs import Rung
from kernels.bench.measure import Bench
from kernels.bench.timing import Spread
from kernels.bench.work import multiplications
from kernels.bench.workload import ENCODER, Workload
from kernels.bench.workloads import deep


@dataclass(frozen=True, slots=True)
class Step:
    """Times of a rung: of a call as in user code, and of a replay of its graph where there is one. error: against the reference."""

    rung: Rung
    called: Spread
    in_graph: Spread | None
    error: float


@dataclass(slots=True)
class Climb:
    """The results in one dtype. peak: multiplications in a microsecond, or None if it was not measured; skipped: reasons; wrong: errors."""

    workload: Workload
    peak: float | None = None
    steps: list[Step] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def rate(self, spread: Spread) -> float:
        """Return the multiplications in a microsecond."""
        return multiplications(self.workload) / spread.median_us

    def speedup(self, spread: Spread | None, in_graph: bool = False) -> float | None:
        """Return the time of the first rung as a multiple of this rung's, if both times were measured."""
        first = next((step.in_graph if in_graph else step.called for step in self.steps if step.rung.number == 1), None)
        return None if first is None or spread is None else first.median_us / spread.median_us


def workload_for(device: str, dtype: str, quick: bool) -> Workload:
    """Return four layers of 512 units over 64 rows of 100 steps. A quick run on a CPU has a small stack."""
    small = Workload("lstm", 4, 12, 32, 32, dtype=dtype, kind=ENCODER, depth=4)
    return small if quick and device == "cpu" else deep("lstm", dtype)


def climb(
    workload: Workload, rungs: Sequence[Rung], device: torch.device, budget_s: float, progress: Callable[[str], None]
) -> Climb:
    """Return the results of all rungs. budget_s: seconds for each time, if 10 repetitions fit into them."""
    result = Climb(workload)
    # Outside of inference mode: layers created within it differ from user code.
    with torch.no_grad():
        case = random_case(workload, device)
        expected = expected_answer(case)
        for rung in rungs:
            progress(f"{rung}, {workload}")
            reason = rung.skips(device)
            if reason is not None:
                result.skipped.append(f"{rung} is skipped: {reason}")
                continue
            try:
                _time(rung, case, expected, device, budget_s, result)
            except Exception as error:  # a rung that fails must not discard the figures of the other rungs
                result.wrong.append(f"{rung}, {workload}: {type(error).__name__}: {error}")
    return result


def product_rate(device: torch.device, dtype: str, budget_s: float) -> float | None:
    """Return the multiplications in a microsecond of a large product, or None if its answer was wrong."""
    product = replace(PRODUCT[device.type], dtype=dtype)
    bench = Bench(device, (Baseline("one product", square_product),), budget_s, lambda _: None)
    times = {one.timing: one.spread.median_us for one in bench.measured([product]).measurements}
    us = times.get("kernel", times.get("eager"))
    return None if us is None else multiplications(product) / us


def _time(rung: Rung, case: BenchCase, expected: ExpectedAnswer, device: torch.device, budget_s: float, result: Climb) -> None:
    call = rung.build(case)

    def check(answer: Any) -> float:
        return expected.error(call.read(answer))

    with torch.inference_mode():
        error, in_graph = check(call.run()), None
        if device.type == "cuda":
            try:
                in_graph = timing.eager(timing.graph_call(call.run, check), device, budget_s)
            except timing.NotCapturableError as reason:
                result.skipped.append(f"{rung} has no graph: {reason}")
        called = in_graph if rung.in_graph else None
        called = called or timing.eager(call.run, device, budget_s)
    result.steps.append(Step(rung, called, in_graph, error))
