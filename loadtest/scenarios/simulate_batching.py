"""Simulate batching policies on a virtual clock, with batch costs measured on a device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernels.bench.tables import three_digits, write
from loadtest import report
from loadtest.discovery import CannotMeasure
from loadtest.scenarios import rounds
from loadtest.simulation import chart, costs, policies
from loadtest.simulation.figures import QUANTILES
from loadtest.simulation.goals import goals
from loadtest.simulation.plan import QUICK, Result, Simulation, SimulationPlan

SUMMARY = "batching policies on a virtual clock, with batch costs measured on a device"
DEFAULT_COST = "h200-lstm-512"
LABELS = ("part", "policy", "mixture", "arrivals", "load", "replicas", "budget_ms", "rate_per_second")
TIMES = tuple(f"{kind}_{quantile}_us" for kind in ("short", "all") for quantile in QUANTILES)
COLUMNS = (*LABELS, *TIMES, "long_share_p50", "utilisation", "rows_a_batch")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cost", default=DEFAULT_COST, help="name of a measured batch cost")
    parser.add_argument("--costs", type=Path, default=costs.PATH, help="file of batch costs")
    parser.add_argument(
        "--measure", metavar="DEVICE", help="only measure batch costs on cpu or cuda:N, and add them to the file"
    )
    parser.add_argument("--budget-ms", type=float, default=0.5, help="batch budget")
    parser.add_argument("--timer-ms", type=float, default=policies.TIMER_MS, help="longest wait of the timer policy")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic")
    parser.add_argument("--quick", action="store_true", help="few and short runs: some seconds")


def run(options: argparse.Namespace) -> int:
    """Run the simulation, or measure costs."""
    if options.measure:
        print(f"{', '.join(costs.measure(options.measure, options.costs))}: written to {options.costs}")
        return 0
    known = costs.read(options.costs)
    if options.cost not in known:
        names = ", ".join(known) or "no costs"
        raise CannotMeasure(
            f"{options.costs} has no cost {options.cost}, it has {names}: choose a measured cost, or use --measure"
        )
    measured = known[options.cost]
    print(f"{measured}\n")
    plan = QUICK if options.quick else SimulationPlan()
    results = list(_with_progress(Simulation(measured.cost, plan, options.budget_ms, options.timer_ms, options.seed)))
    print("\n" + _table(results) + "\n\n" + "\n".join(str(goal) for goal in goals(results)) + "\n")
    name = f"simulate-{options.cost}"
    write(options.out / f"{name}.jsonl", ({"cost": options.cost, **result.record()} for result in results))
    for path in chart.draw(options.out, name, f"simulated: {measured}", results):
        print(f"written to {path}")
    return 0


def _with_progress(simulation: Simulation) -> Iterator[Result]:
    for done, result in enumerate(simulation.everything(), 1):
        line = f"{done} runs, {result.part}: {result.policy}, {result.mixture}"
        print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)
        yield result
    print(file=sys.stderr)


def _table(results: Sequence[Result]) -> str:
    records = (result.record() for result in results)
    return report.table([rounds.headings(COLUMNS), *([_cell(record[name]) for name in COLUMNS] for record in records)])


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return three_digits(value)
    return "" if value is None else str(value)
