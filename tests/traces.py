"""Reads a trace as its viewers do, and fails where they would draw it wrongly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple


class DrawnSlice(NamedTuple):
    """A slice of a track, in nanoseconds."""

    begin: int
    end: int
    name: str
    args: dict[str, Any]

    def holds(self, other: DrawnSlice, slack: int = 0) -> bool:
        return self.begin - slack <= other.begin and other.end <= self.end + slack


def tracks(trace: dict[str, Any]) -> dict[str, list[DrawnSlice]]:
    """Return the slices of each track of a single engine; fails if a viewer would not accept the trace."""
    [found] = processes(trace).values()
    return found


def processes(trace: dict[str, Any]) -> dict[str, dict[str, list[DrawnSlice]]]:
    """Return the tracks of each process."""
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"X", "M"}
    assert all(type(event["pid"]) is type(event["tid"]) is int for event in events)
    found = {}
    for pid in sorted({event["pid"] for event in events}):
        own_events = [event for event in events if event["pid"] == pid]
        assert len(_metadata(own_events, "process_sort_index")) == 1
        [(_, name)] = _metadata(own_events, "process_name")
        found[name] = _tracks(own_events)
    return found


def _tracks(events: list[dict[str, Any]]) -> dict[str, list[DrawnSlice]]:
    drawn = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["name"], str) and isinstance(event["args"], dict)
            begin = round(1000 * event["ts"])
            drawn[event["tid"]].append(DrawnSlice(begin, begin + round(1000 * event["dur"]), event["name"], event["args"]))
    names, order = dict(_metadata(events, "thread_name")), dict(_metadata(events, "thread_sort_index"))
    assert names.keys() == order.keys() == drawn.keys(), "every track has a name, a position and slices"
    assert len(set(names.values())) == len(names)
    for tid, slices in drawn.items():
        assert_nested(names[tid], slices)
    return {names[tid]: drawn[tid] for tid in sorted(drawn, key=lambda tid: order[tid])}


def _metadata(events: Iterable[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    """Return this metadata by track number."""
    return [(event["tid"], *event["args"].values()) for event in events if event["ph"] == "M" and event["name"] == name]


def assert_nested(track: str, slices: list[DrawnSlice]) -> None:
    """Check that any two slices are disjoint or nested. If two slices begin together, the outer slice comes first."""
    outer: list[DrawnSlice] = []
    for piece in sorted(slices, key=lambda piece: piece.begin):
        while outer and outer[-1].end <= piece.begin:
            outer.pop()
        assert not outer or piece.end <= outer[-1].end, f"{track}: {piece} overlaps {outer[-1]}"
        outer.append(piece)
