"""Measures workloads in sequence. A backend or baseline is timed only if it agrees with the expected answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from kernels.backend import Backend, Problem, accepts_everything
from kernels.bench import timing
from kernels.bench.agreement import ExpectedAnswer, expected_answer
from kernels.bench.baselines.baseline import Baseline, MissingError, TimedCall
from kernels.bench.case import BenchCase, random_case
from kernels.bench.report import Measurement
from kernels.bench.weights import STORED
from kernels.bench.workload import BASELINES_ONLY, INT8, NEXT_STEPS, Workload


@dataclass(slots=True)
class Findings:
    """Results of a run. refused: why our backends refused workloads; skipped: why others were not timed; wrong: errors.

    Each reason in `refused` and `skipped` is kept once.
    """

    measurements: list[Measurement] = field(default_factory=list)
    refused: dict[str, None] = field(default_factory=dict)
    skipped: dict[str, None] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Bench:
    """Times our backends and baselines on one device.

    budget_s: seconds for each figure, if 10 repetitions fit into them; progress: called with a line about each workload.
    """

    device: torch.device
    baselines: Sequence[Baseline]
    budget_s: float
    progress: Callable[[str], None]

    def measured(self, workloads: Sequence[Workload]) -> Findings:
        findings = Findings()
        for done, workload in enumerate(workloads):
            self.progress(f"{done + 1}/{len(workloads)} {workload}")
            self._measure(workload, findings)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the next arrays have other sizes, and some take gigabytes
        return findings

    def _measure(self, workload: Workload, findings: Findings) -> None:
        # Outside of inference mode: layers created within it differ from user code.
        with torch.no_grad():
            case = random_case(workload, self.device)
            expected = expected_answer(case) if case.weights else None
            for contender in self._contenders(workload, findings):
                self._time(contender, case, expected, findings)

    def _contenders(self, workload: Workload, findings: Findings) -> Iterator[Baseline]:
        """Yield our backends, each as a baseline, then the baselines of the workload."""
        levels = workload.depth if workload.directions == 1 else 1
        problem = Problem(self.device, STORED[workload.dtype], workload.outputs, levels=levels)
        backends: tuple[Backend, ...] = import_module(f"kernels.{workload.family}").BACKENDS
        for backend in () if workload.kind in BASELINES_ONLY else backends:
            without_int8 = workload.dtype == INT8 and backend.name != "cpu"
            reason = "has no int8 products" if without_int8 else backend.refuses(problem)
            if reason is None and _too_slow(backend, workload):
                line = f"{backend.name} is the last resort: on the grids of sizes, it is timed up to 128 steps of 32 rows"
                findings.skipped[line] = None
            elif reason is None:
                yield Baseline(backend.name, partial(_our_call, backend.name))
                if workload.kind == NEXT_STEPS and self.device.type == "cuda":
                    break  # users get the first; the others would take minutes
            elif backend.name != "reference":
                findings.refused[f"{backend.name} refuses: {reason}"] = None
        baselines = () if workload.dtype == INT8 else self.baselines
        yield from (baseline for baseline in baselines if baseline.applies(workload, self.device.type))

    def _time(self, contender: Baseline, case: BenchCase, our_answer: ExpectedAnswer | None, findings: Findings) -> None:
        try:
            call = contender.build(case)
            expected = call.expected or our_answer
            assert expected is not None, "a workload without an encoder needs baselines with an expected answer"
            expected = replace(expected, tolerance=contender.slack * expected.tolerance)
            with torch.inference_mode():
                error = expected.error(call.read(call.run()))
                for timed, spread in self._timings(contender, case.workload, call, expected, findings):
                    measurement = Measurement(case.workload, contender.name, timed, spread, error)
                    findings.measurements.append(measurement)
        except MissingError as error:
            findings.skipped[f"{contender.name} is skipped: {error}"] = None
        except Exception as error:  # a baseline that fails must not discard the figures of the others
            findings.wrong.append(f"{contender.name} on {case.workload}: {type(error).__name__}: {error}")

    def _timings(
        self, contender: Baseline, workload: Workload, call: TimedCall, expected: ExpectedAnswer, findings: Findings
    ) -> Iterator[tuple[str, timing.Spread]]:
        """Yield every timing. On a grid of sizes, the kernel time is enough where there is one."""
        graph_only = workload.kernel_only and contender.eager_only is None and self.device.type == "cuda"
        if not graph_only:
            yield "eager", timing.eager(call.run, self.device, self.budget_s)
        if self.device.type != "cuda":
            return

        def check(answer: Any) -> object:
            return expected.error(call.read(answer))

        try:
            if contender.eager_only is not None:
                raise timing.NotCapturableError(contender.eager_only)
            yield "kernel", timing.kernel(call.run, check, self.budget_s)
            if not workload.kernel_only:
                yield "replay", timing.kernel(call.run, check, self.budget_s, copies=1)
        except timing.NotCapturableError as error:
            findings.skipped[f"{contender.name} has eager times only: {error}"] = None
            if graph_only:
                yield "eager", timing.eager(call.run, self.device, self.budget_s)


def _too_slow(backend: Backend, workload: Workload) -> bool:
    """A grid has sizes for which the last resort takes seconds of host time, and on which users never get it."""
    small = workload.steps <= 128 and workload.rows <= 32
    return workload.in_grid and not small and backend.refuses is accepts_everything


def _our_call(backend: str, case: BenchCase) -> TimedCall:
    return TimedCall(case.encoder(backend))
