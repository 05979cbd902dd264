"""`python -m loadtest.simulate`: ways of batching on a virtual clock, with the cost of turns that was measured on a device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtest import report
from loadtest.simulation import chart, costs, ways
from loadtest.simulation.goals import goals
from loadtest.simulation.plan import QUICK, Plan, Result, Simulation

DEFAULT_COST = "h200-lstm-512"
COLUMNS = {
    "part": "part",
    "way": "way",
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
    "utilisation": "works",
    "rows_a_turn": "rows/turn",
}


def main(arguments: Sequence[str] | None = None) -> int:
    said = _parser().parse_args(arguments)
    if said.measure:
        print(f"{', '.join(costs.measure(said.measure, said.costs))}: written to {said.costs}")
        return 0
    known = costs.read(said.costs)
    if said.cost not in known:
        print(f"{said.costs} has no {said.cost}, but {', '.join(known) or 'nothing'}: name one, or --measure", file=sys.stderr)
        return 1
    entry = known[said.cost]
    print(f"{entry}\n")
    plan = QUICK if said.quick else Plan()
    results = list(_told(Simulation(entry.cost, plan, said.budget_ms, said.timer_ms, said.seed)))
    print("\n" + "\n".join(_table(results)) + "\n\n" + "\n".join(str(goal) for goal in goals(results)) + "\n")
    name = f"simulate-{said.cost}"
    report.write(said.out / f"{name}.jsonl", ({"cost": said.cost, **one.record()} for one in results))
    for path in chart.draw(said.out, name, f"simulated: {entry}", results):
        print(f"written to {path}")
    return 0


def _told(simulation: Simulation) -> Iterator[Result]:
    """A sign of life for each run."""
    for done, one in enumerate(simulation.everything(), 1):
        told = f"{done} runs, {one.part}: {one.way}, {one.mixture}"
        print(f"\r{told:<60}", end="", file=sys.stderr, flush=True)
        yield one
    print(file=sys.stderr)


def _table(results: Sequence[Result]) -> Iterator[str]:
    lines = [list(COLUMNS.values())]
    for one in results:
        record = one.record()
        lines.append([_cell(record[name]) for name in COLUMNS])
    yield from report.table(lines)


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulate", description="Ways of batching on a virtual clock.")
    parser.add_argument(
        "--cost", default=DEFAULT_COST, help="what turns cost, by its name in the file; %(default)s unless given"
    )
    parser.add_argument("--costs", type=Path, default=costs.PATH, help="the file, %(default)s unless given")
    parser.add_argument(
        "--measure", metavar="DEVICE", help="write what turns cost on cpu or cuda:N to that file, and simulate nothing"
    )
    parser.add_argument("--budget-ms", type=float, default=0.5, help="of a turn, %(default)s unless given")
    parser.add_argument("--timer-ms", type=float, default=ways.TIMER_MS, help="of timer batching, %(default)s unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few and short runs, some seconds")
    parser.add_argument("--out", type=Path, default=costs.PATH.parent, help="folder of what is written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
