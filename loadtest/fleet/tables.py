"""The tables of docs/sizing.md, from the records of a simulation and from the measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loadtest.fleet.check import Check, ratio
from loadtest.fleet.machines import KINDS

Record = Mapping[str, Any]
Table = Sequence[Sequence[str]]
NO_VALUE = ""


def tables(records: Sequence[Record], checks: Iterable[Check]) -> dict[str, str]:
    """Return each table as Markdown by its name."""
    parts = {part: [record for record in records if record["part"] == part] for part in PARTS}
    written = {name: markdown(make(parts[part])) for name, (part, make) in TABLES.items()}
    return {**written, "check": markdown(check_table(checks))}


def markdown(table: Table) -> str:
    """Return a Markdown table. The first line has the headings."""
    heading, *lines = table
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, ["---"] * len(heading), *lines))


def number(value: float | None) -> str:
    """Return a number with three digits, or with all digits before the decimal point, in groups of three."""
    if value is None:
        return NO_VALUE
    if math.isinf(value):
        return "beyond"
    if value == int(value) or abs(value) >= 99.5:
        return f"{round(value):,}"
    return f"{value:.3g}"


def machine_table(records: Sequence[Record]) -> Table:
    """Return the replicas that each machine needs for each kind of request."""
    prices = {record["price_an_hour"] for record in records}
    at = f", at {number(prices.pop())} an hour" if len(prices) == 1 else ""
    fields = {
        "max_sessions": "most sessions",
        "rate_closed": "a second, at most",
        "rate_within_p99": "within the p99",
        "streams_a_core": "of these a core",
        "replicas_rate": "for the rate",
        "replicas_p99": "for the p99",
        "replicas_sessions": "for the sessions",
        "replicas_total": "**replicas**",
        "utilisation": "load of each",
        "cost_a_million": f"cost of a million{at}",
    }
    lines = [[record["machine"], KINDS[record["request"]], *(number(record[field]) for field in fields)] for record in records]
    return [["machine", "request", *fields.values()], *lines]


def fullest_table(records: Sequence[Record]) -> Table:
    return _by_hashing(records, lambda record: f"{record['most_times_mean']:.2f}")


def moved_table(records: Sequence[Record]) -> Table:
    """Return the sessions that move when a replica is added, and how many of them the new replica does not own afterwards."""
    return _by_hashing(records, lambda record: f"{number(record['added_moved'])} ({number(record['added_others'])})")


def rolling_table(records: Sequence[Record]) -> Table:
    """Return the moves of a rolling update, for each session."""
    return _by_hashing(
        records, lambda record: f"{record['rolling_moved'] / (record['sessions_mean'] * record['replicas']):.2f}"
    )


def _by_hashing(records: Sequence[Record], cell: Any) -> Table:
    names = list(dict.fromkeys(record["hashing"] for record in records))
    lines = [
        [number(count), *(cell(record) for record in records if record["replicas"] == count)]
        for count in dict.fromkeys(record["replicas"] for record in records)
    ]
    return [["replicas", *names], *lines]


def failure_table(records: Sequence[Record]) -> Table:
    models = list(dict.fromkeys(record["model"] for record in records))
    sizes = [next(record["state_bytes"] for record in records if record["model"] == model) for model in models]
    headings = [f"MB moved, {model} ({number(size)} B)" for model, size in zip(models, sizes, strict=True)]
    lines = []
    for count in dict.fromkeys(record["replicas"] for record in records):
        of_count = [record for record in records if record["replicas"] == count]
        first = of_count[0]
        moved = (number(record["moved_mb_a_change"]) for record in of_count)
        lines.append([number(count), number(first["crash_sessions"]), number(first["zone_sessions"]), *moved])
    return [["replicas", "sessions of one", "sessions of a zone", *headings], *lines]


def checkpoint_table(records: Sequence[Record]) -> Table:
    """Return the traffic of copies of states, and of an update that moves every session twice, by model."""
    lines = []
    for model in dict.fromkeys(record["model"] for record in records):
        first = next(record for record in records if record["model"] == model)
        fields = ("state_bytes", "checkpoint_mb_a_second", "chunks_lost_a_session", "update_gb")
        lines.append([model, *(number(first[field]) for field in fields)])
    return [["model", "bytes of a state", "MB a second", "chunks to send again", "GB of an update"], *lines]


def autoscaling_table(records: Sequence[Record]) -> Table:
    fields = {
        "replicas_mean": "replicas, mean",
        "replicas_most": "most",
        "busy_mean": "load, times capacity",
        "changes": "added and removed",
        "sessions_moved": "sessions moved",
        "refused_share": "refused",
        "seconds_beyond_p99": "seconds beyond the p99",
    }
    lines = [
        [
            record["day"],
            record["policy"],
            *(_share(record[field]) if field == "refused_share" else number(record[field]) for field in fields),
        ]
        for record in records
    ]
    return [["day", "metrics and targets", *fields.values()], *lines]


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"


def check_table(checks: Iterable[Check]) -> Table:
    """Return predicted and measured figures side by side."""
    lines = [
        [
            check.machine,
            KINDS.get(check.request, check.request),
            check.what,
            number(check.predicted),
            number(check.measured),
            _times(check),
        ]
        for check in checks
    ]
    return [["machine", "request", "figure", "predicted", "measured", "measured / predicted"], *lines]


def _times(check: Check) -> str:
    return f"{ratio(check):.2f}" if ratio(check) else NO_VALUE


PARTS = ("spread", "failures", "autoscaling", "machines")
TABLES = {
    "machines": ("machines", machine_table),
    "fullest": ("spread", fullest_table),
    "moved": ("spread", moved_table),
    "rolling": ("spread", rolling_table),
    "failures": ("failures", failure_table),
    "checkpoints": ("failures", checkpoint_table),
    "autoscaling": ("autoscaling", autoscaling_table),
}
