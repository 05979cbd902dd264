"""`python -m loadtest.simulate`: simulate batching policies on a virtual clock, with batch costs measured on a device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtest import report
from loadtest.simulation import chart, costs, policies
from loadtest.simulation.goals import goals
from loadtest.simulation.plan import QUICK, Result, Simulation, SimulationPlan

DEFAULT_COST = "h200-lstm-512"
COLUMNS = {
    "part": "part",
    "policy": "policy",
    "mixture": "mixture",
    "arrivals": "arrivals",
    "load": "load",
    "replicas": "replicas",
    "budget_ms": "budget ms",
    "rate_per_second": "rate/s",
    "short_p50_us": "short p50 us",
    "short_p99_us": "p99",
    "short_p99.9_us": "p99.9",
    "all_p50_us": "all p50 us",
    "all_p99_us": "p99",
    "all_p99.9_us": "p99.9",
    "long_share_p50": "long pace",
    "utilisation": "utilisation",
    "rows_a_batch": "rows/batch",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation, or measure costs. Returns 1 when the named cost is unknown."""
    options = _parser().parse_args(arguments)
    if options.measure:
        print(f"{', '.join(costs.measure(options.measure, options.costs))}: written to {options.costs}")
        return 0
    known = costs.read(options.costs)
    if options.cost not in known:
        names = ", ".join(known) or "no costs"
        print(
            f"{options.costs} has no cost {options.cost}, it has {names}: choose a measured cost, or use --measure",
            file=sys.stderr,
        )
        return 1
    measured = known[options.cost]
    print(f"{measured}\n")
    plan = QUICK if options.quick else SimulationPlan()
    results = list(_with_progress(Simulation(measured.cost, plan, options.budget_ms, options.timer_ms, options.seed)))
    print("\n" + "\n".join(_table(results)) + "\n\n" + "\n".join(str(goal) for goal in goals(results)) + "\n")
    name = f"simulate-{options.cost}"
    report.write(options.out / f"{name}.jsonl", ({"cost": options.cost, **result.record()} for result in results))
    for path in chart.draw(options.out, name, f"simulated: {measured}", results):
        print(f"written to {path}")
    return 0


def _with_progress(simulation: Simulation) -> Iterator[Result]:
    for done, result in enumerate(simulation.everything(), 1):
        line = f"{done} runs, {result.part}: {result.policy}, {result.mixture}"
        print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)
        yield result
    print(file=sys.stderr)


def _table(results: Sequence[Result]) -> Iterator[str]:
    records = (result.record() for result in results)
    yield from report.table([list(COLUMNS.values()), *([_cell(record[name]) for name in COLUMNS] for record in records)])


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulate", description="Batching policies on a virtual clock.")
    parser.add_argument("--cost", default=DEFAULT_COST, help="name of a measured batch cost (default: %(default)s)")
    parser.add_argument("--costs", type=Path, default=costs.PATH, help="file of batch costs (default: %(default)s)")
    parser.add_argument(
        "--measure", metavar="DEVICE", help="only measure batch costs on cpu or cuda:N, and add them to the file"
    )
    parser.add_argument("--budget-ms", type=float, default=0.5, help="batch budget (default: %(default)s)")
    parser.add_argument(
        "--timer-ms", type=float, default=policies.TIMER_MS, help="longest wait of the timer policy (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few and short runs: some seconds")
    parser.add_argument("--out", type=Path, default=costs.PATH.parent, help="output folder (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
