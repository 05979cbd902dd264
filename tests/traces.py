"""A trace as its viewers read it, and what they would draw wrongly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple


class Slice(NamedTuple):
    """A slice as it is drawn, in nanoseconds."""

    begin: int
    end: int
    name: str
    args: dict[str, Any]

    def holds(self, other: Slice, slack: int = 0) -> bool:
        return self.begin - slack <= other.begin and other.end <= self.end + slack


def rows(trace: dict[str, Any]) -> dict[str, list[Slice]]:
    """The slices of a single engine's rows, by the name of the row; fails where the trace is not what a viewer takes."""
    [found] = processes(trace).values()
    return found


def processes(trace: dict[str, Any]) -> dict[str, dict[str, list[Slice]]]:
    """The same of each process, by its name."""
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"X", "M"}
    assert all(type(event["pid"]) is type(event["tid"]) is int for event in events)
    found = {}
    for pid in sorted({event["pid"] for event in events}):
        mine = [event for event in events if event["pid"] == pid]
        assert len(_metadata(mine, "process_sort_index")) == 1
        [(_, name)] = _metadata(mine, "process_name")
        found[name] = _rows(mine)
    return found


def _rows(events: list[dict[str, Any]]) -> dict[str, list[Slice]]:
    drawn = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["name"], str) and isinstance(event["args"], dict)
            begin = round(1000 * event["ts"])
            drawn[event["tid"]].append(Slice(begin, begin + round(1000 * event["dur"]), event["name"], event["args"]))
    names, order = dict(_metadata(events, "thread_name")), dict(_metadata(events, "thread_sort_index"))
    assert names.keys() == order.keys() == drawn.keys(), "every row has a name and a place, and is drawn"
    assert len(set(names.values())) == len(names)
    for tid, slices in drawn.items():
        assert_nested(names[tid], slices)
    return {names[tid]: drawn[tid] for tid in sorted(drawn, key=lambda tid: order[tid])}


def _metadata(events: Iterable[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    """What is said of rows, by their numbers."""
    return [(event["tid"], *event["args"].values()) for event in events if event["ph"] == "M" and event["name"] == name]


def assert_nested(row: str, slices: list[Slice]) -> None:
    """Any two are apart, or one lies within the other, which then stands before it where both begin together."""
    outer: list[Slice] = []
    for one in sorted(slices, key=lambda one: one.begin):
        while outer and outer[-1].end <= one.begin:
            outer.pop()
        assert not outer or one.end <= outer[-1].end, f"{row}: {one} overlaps {outer[-1]}"
        outer.append(one)
