"""What an engine did, turn by turn, as the slices that ui.perfetto.dev and chrome://tracing draw.

Pure: turns and a profiler's events in, trace events out. Nothing here knows a clock, a device or a profiler.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from service.ipc.messages import ModelKey

OPERATION = "cpu_op"
HOST = {"cuda_runtime": "launches", "cuda_driver": "launches", OPERATION: "operations"}
"""The profiler's categories of what the host did, and the rows on which it is drawn."""
DEVICE = {"gpu_memcpy": "copies", "gpu_memset": "copies", "kernel": "kernels"}
"""The same of what the device did, with a row for each of its streams."""
POLLS = "cudaEventQuery"
"""The loop asks again and again whether a turn has ended: that is no launch."""
MARK = "user_annotation"
Event = dict[str, Any]


@dataclass(slots=True)
class TracedBatch:
    """One turn that was recorded. Moments are seconds on the clock of time.monotonic.

    arrivals: of its sequences, none where it was run again row by row; by: graph or launches; asynchronous: the device worked while
    the host went on; free: when the turn before it had ended; ended: when the device had done it; apart: when each answer was by
    itself; replied: when the answers were written.
    """

    model: ModelKey
    rows: int
    tokens: int
    longest: int
    padded_tokens: int
    by: str
    asynchronous: bool
    arrivals: Sequence[float]
    began: float
    staged: float
    launched: float
    free: float
    ended: float
    apart: float
    replied: float


class Profiled(msgspec.Struct, frozen=True):
    """An event as torch's profiler exports it: ts and dur are microseconds on the profiler's clock; tid is a stream, or a thread."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: Any = None
    args: dict[str, Any] = {}


class Mark(NamedTuple):
    """An event by which the profiler's clock is known: it began and ended between two moments of time.monotonic."""

    name: str
    before: float
    after: float


class Slice(NamedTuple):
    """A stretch of time on a row, in nanoseconds on the clock of time.monotonic; `parts` lie within it."""

    name: str
    begin: int
    end: int
    args: dict[str, Any]
    parts: tuple[Slice, ...] = ()


class Row(NamedTuple):
    """Slices of which each two are apart, or one lies within the other."""

    name: str
    slices: Iterable[Slice]


def events(
    place: int, device: str, batches: Sequence[TracedBatch], profiled: Sequence[Profiled], marks: Sequence[Mark]
) -> list[Event]:
    """The trace events of one engine, which is a process of the trace; turns come in the order in which they ended."""
    found = [_named("process", place, 0, f"engine-{place} {device}"), _sorted("process", place, 0, place)]
    for number, row in enumerate(_rows(batches, profiled, marks), start=1):
        found += [_named("thread", place, number, row.name), _sorted("thread", place, number, number)]
        found += [event for one in row.slices for event in _drawn(one, place, number)]
    return found


def _rows(batches: Sequence[TracedBatch], profiled: Sequence[Profiled], marks: Sequence[Mark]) -> Iterator[Row]:
    """From the queue down to the device's own work."""
    yield from _apart("queue", (_queued(number, batch) for number, batch in enumerate(batches) if batch.arrivals))
    yield from _apart("batches", (_turn(number, batch) for number, batch in enumerate(batches)))
    if batches:
        on_host, on_device = _seen(profiled, marks)
        work = _device(batches, on_host["launches"], [one for slices in on_device.values() for one in slices])
        yield from _apart("device", work)
        for name, slices in sorted(on_host.items()):
            yield from _some(name, _nested(_within(slices, _ns(batches[0].began), _ns(batches[-1].ended))))
        for name, slices in sorted(on_device.items()):
            yield from _apart(name, _within(slices, work[0].begin, work[-1].end) if work else ())


def _queued(number: int, batch: TracedBatch) -> Slice:
    """From its oldest sequence's arrival until the turn began."""
    waited = [batch.began - arrived for arrived in batch.arrivals]
    args = {"batch": number, "rows": batch.rows, "mean_us": round(1e6 * sum(waited) / len(waited), 1)}
    return Slice(batch.model.name, _ns(min(batch.arrivals)), _ns(batch.began), args)


def _turn(number: int, batch: TracedBatch) -> Slice:
    """With its stages. Between launch and stage_out of a turn on a GPU the host is free for other turns."""
    moments = (batch.began, batch.staged, batch.launched, batch.ended, batch.apart, batch.replied)
    began, staged, launched, ended, apart, replied = (_ns(moment) for moment in moments)
    stages = (
        Slice("stage_in", began, staged, {}),
        Slice("launch" if batch.asynchronous else "compute", staged, launched, {}),
        Slice("stage_out", ended, apart, {}),
        Slice("reply", apart, replied, {}),
    )
    return Slice(batch.model.name, began, replied, _described(number, batch), stages)


def _described(number: int, batch: TracedBatch) -> dict[str, Any]:
    return {
        "batch": number,
        "model": batch.model.name,
        "version": batch.model.version,
        "rows": batch.rows,
        "tokens": batch.tokens,
        "longest": batch.longest,
        "by": batch.by,
        "padded_tokens": batch.padded_tokens,
    }


def _device(batches: Sequence[TracedBatch], calls: Sequence[Slice], works: Sequence[Slice]) -> list[Slice]:
    """When the device had each turn: one after the other, from what it was asked first, or its last turn's end, until it was seen to have
    ended. An end is seen late when the host is busy: where the next turn's work is known to have begun before, it ended then.
    """
    begins = [max(_ns(batch.staged), _ns(batch.free)) for batch in batches]
    for number, first in _first_works(batches, calls, works).items():
        begins[number] = min(begins[number], first)
    ends = [_ns(batch.ended) for batch in batches]
    cut = [min(end, following) for end, following in zip(ends, [*begins[1:], ends[-1]], strict=True)]
    return [
        Slice(batch.model.name, begin, max(begin, end), {"batch": number})
        for number, (batch, begin, end) in enumerate(zip(batches, begins, cut, strict=True))
        if batch.asynchronous
    ]


def _first_works(batches: Sequence[TracedBatch], calls: Sequence[Slice], works: Sequence[Slice]) -> dict[int, int]:
    """When the device began with each turn, as far as the calls are known that asked for its work."""
    asked = {call.args["correlation"]: call.begin for call in calls if "correlation" in call.args}
    begins, firsts = [_ns(batch.began) for batch in batches], dict[int, int]()
    for work in works:
        at = asked.get(work.args.get("correlation"))
        number = -1 if at is None else bisect_right(begins, at) - 1
        if at is not None and number >= 0 and at <= _ns(batches[number].launched):
            firsts[number] = min(firsts.get(number, work.begin), work.begin)
    return firsts


def _seen(
    profiled: Sequence[Profiled], marks: Sequence[Mark]
) -> tuple[defaultdict[str, list[Slice]], defaultdict[str, list[Slice]]]:
    """What the host and what the device did, by row; nothing when no mark says how late it was."""
    on_host, on_device = defaultdict[str, list[Slice]](list), defaultdict[str, list[Slice]](list)
    shift = _shift(profiled, marks)
    for one in profiled if shift is not None else ():
        assert shift is not None
        if one.cat in HOST and one.name != POLLS:
            on_host[HOST[one.cat]].append(_slice(one, shift))
        elif one.cat in DEVICE:
            on_device[f"{DEVICE[one.cat]}, stream {one.tid}"].append(_slice(one, shift))
    return on_host, on_device


def _slice(one: Profiled, shift: int) -> Slice:
    begin = round(1000 * one.ts) + shift
    # Of operations there are hundreds in a turn, and what is said of them are numbers of the profiler's own.
    return Slice(one.name, begin, begin + round(1000 * one.dur), {} if one.cat == OPERATION else one.args)


def _shift(profiled: Sequence[Profiled], marks: Sequence[Mark]) -> int | None:
    """How many nanoseconds the profiler's clock is behind: by the mark that took the shortest, and so leaves the least doubt."""
    found = {one.name: one for one in profiled if one.cat == MARK}
    known = [mark for mark in marks if mark.name in found]
    if not known:
        return None
    best = min(known, key=lambda mark: mark.after - mark.before)
    event = found[best.name]
    return _ns((best.before + best.after) / 2) - round(1000 * (event.ts + event.dur / 2))


def _within(slices: Iterable[Slice], begin: int, end: int) -> list[Slice]:
    """Those that began then: others are of turns that were not recorded."""
    return [one for one in slices if begin <= one.begin <= end]


def _apart(name: str, slices: Iterable[Slice]) -> Iterator[Row]:
    """As many rows as it takes for none to overlap another."""
    rows: list[list[Slice]] = []
    for one in sorted(slices, key=lambda one: one.begin):
        row = next((row for row in rows if row[-1].end <= one.begin), None)
        if row is None:
            rows.append([one])
        else:
            row.append(one)
    for number, row in enumerate(rows, start=1):
        yield Row(name if number == 1 else f"{name} ({number})", row)


def _some(name: str, slices: Sequence[Slice]) -> Iterator[Row]:
    """One row, if there is anything to draw."""
    if slices:
        yield Row(name, slices)


def _nested(slices: Iterable[Slice]) -> list[Slice]:
    """Calls of the engine's one thread, each within its caller; what stands out, as clocks are read to the nanosecond, is cut."""
    found: list[Slice] = []
    callers: list[Slice] = []
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        while callers and callers[-1].end <= one.begin:
            callers.pop()
        callers.append(one._replace(end=callers[-1].end) if callers and callers[-1].end < one.end else one)
        found.append(callers[-1])
    return found


def _drawn(one: Slice, pid: int, tid: int) -> Iterator[Event]:
    """A slice before its parts: of two that begin together, the first is the outer one."""
    times = {"ts": one.begin / 1000, "dur": (one.end - one.begin) / 1000}
    yield {"ph": "X", "name": one.name, "pid": pid, "tid": tid, **times, "args": one.args}
    for part in one.parts:
        yield from _drawn(part, pid, tid)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _sorted(what: str, pid: int, tid: int, index: int) -> Event:
    return {"ph": "M", "name": f"{what}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": index}}


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
