"""The batches of one engine as trace events, which ui.perfetto.dev and chrome://tracing draw as slices on tracks.

Pure: batches and the profiler's events in, trace events out. Nothing here knows a clock, a device or a profiler.

The profiler's export is not used directly. It shows every call between start and stop, with its own process and thread numbers and on its
own clock. A trace of several engines needs one process per engine, the calls of the recorded batches only, and one clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from service.ipc.messages.models import ModelKey

OPERATION = "cpu_op"
HOST = {"cuda_runtime": "launches", "cuda_driver": "launches", OPERATION: "operations"}
"""The profiler's categories of host work, and their tracks."""
DEVICE = {"gpu_memcpy": "copies", "gpu_memset": "copies", "kernel": "kernels"}
"""The profiler's categories of device work, and their tracks; each stream has a track."""
POLLS = "cudaEventQuery"
"""The engine's loop polls with this call for the end of a batch: it is not a launch."""
MARK = "user_annotation"
Event = dict[str, Any]


@dataclass(slots=True)
class TracedBatch:
    """A recorded batch. Moments are seconds on the clock of time.monotonic.

    by: "graph", "resident" or "launches".
    asynchronous: whether the host continued while the device worked.
    arrivals: of the sequences; empty if the batch is a part of a failed batch that runs again.
    device_free: when the previous batch had ended.
    ended: when the engine saw that the device had finished; split: when the results were split; replied: when the replies were written.
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
    device_free: float
    ended: float
    split: float
    replied: float


class ProfilerEvent(msgspec.Struct, frozen=True):
    """An event of torch's profiler. ts and dur are microseconds on the profiler's clock; tid is a stream or a thread."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: Any = None
    args: dict[str, Any] = {}


class ClockMark(NamedTuple):
    """An event that relates the profiler's clock to time.monotonic: it lies between these two moments."""

    name: str
    before: float
    after: float


class TraceSlice(NamedTuple):
    """A span of a track, in nanoseconds on the clock of time.monotonic. `parts` lie within it."""

    name: str
    begin: int
    end: int
    args: dict[str, Any]
    parts: tuple[TraceSlice, ...] = ()


class Track(NamedTuple):
    """Slices of one line of the drawing. Two slices are either disjoint or nested."""

    name: str
    slices: Iterable[TraceSlice]


def events(
    place: int, device: str, batches: Sequence[TracedBatch], profiled: Sequence[ProfilerEvent], marks: Sequence[ClockMark]
) -> list[Event]:
    """Return the trace events of engine number `place`, which is one process of the trace. Batches come in the order of their ends."""
    trace = _labelled("process", place, 0, f"engine-{place} {device}", place)
    for number, track in enumerate(_tracks(batches, profiled, marks), start=1):
        trace += _labelled("thread", place, number, track.name, number)
        trace += [event for piece in track.slices for event in _drawn(piece, place, number)]
    return trace


def _tracks(batches: Sequence[TracedBatch], profiled: Sequence[ProfilerEvent], marks: Sequence[ClockMark]) -> Iterator[Track]:
    """Yield the tracks from the queue down to the kernels."""
    yield from _disjoint("queue", (_queue_slice(number, batch) for number, batch in enumerate(batches) if batch.arrivals))
    yield from _disjoint("batches", (_batch_slice(number, batch) for number, batch in enumerate(batches)))
    if batches:
        host, device = _profiled_slices(profiled, marks)
        work = _device_slices(batches, host["launches"], [piece for slices in device.values() for piece in slices])
        yield from _disjoint("device", work)
        for name, slices in sorted(host.items()):
            nested = _nested(_begun_within(slices, _ns(batches[0].began), _ns(batches[-1].ended)))
            if nested:
                yield Track(name, nested)
        for name, slices in sorted(device.items()):
            yield from _disjoint(name, _begun_within(slices, work[0].begin, work[-1].end) if work else ())


def _queue_slice(number: int, batch: TracedBatch) -> TraceSlice:
    """Return the time from the arrival of the oldest sequence until the batch begins."""
    waited = [batch.began - arrived for arrived in batch.arrivals]
    args = {"batch": number, "rows": batch.rows, "mean_us": round(1e6 * sum(waited) / len(waited), 1)}
    return TraceSlice(batch.model.name, _ns(min(batch.arrivals)), _ns(batch.began), args)


def _batch_slice(number: int, batch: TracedBatch) -> TraceSlice:
    """Return a batch with its stages. Between launch and stage_out of a batch on a GPU the host is free for other batches."""
    moments = (batch.began, batch.staged, batch.launched, batch.ended, batch.split, batch.replied)
    began, staged, launched, ended, split, replied = map(_ns, moments)
    stages = (
        TraceSlice("stage_in", began, staged, {}),
        TraceSlice("launch" if batch.asynchronous else "compute", staged, launched, {}),
        TraceSlice("stage_out", ended, split, {}),
        TraceSlice("reply", split, replied, {}),
    )
    args = {
        "batch": number,
        "model": batch.model.name,
        "version": batch.model.version,
        "rows": batch.rows,
        "tokens": batch.tokens,
        "longest": batch.longest,
        "by": batch.by,
        "padded_tokens": batch.padded_tokens,
    }
    return TraceSlice(batch.model.name, began, replied, args, stages)


def _device_slices(
    batches: Sequence[TracedBatch], launches: Sequence[TraceSlice], work: Sequence[TraceSlice]
) -> list[TraceSlice]:
    """Return the time that each batch had the device.

    It begins with the first work of the batch that the profiler saw, else when the batch was staged and the device was free. It ends when
    the engine saw its end, or earlier if the next batch has begun by then: a busy host sees an end late.
    """
    begins = [max(_ns(batch.staged), _ns(batch.device_free)) for batch in batches]
    for number, first in _first_work(batches, launches, work).items():
        begins[number] = min(begins[number], first)
    ends = [_ns(batch.ended) for batch in batches]
    cut = [min(end, next_begin) for end, next_begin in zip(ends, [*begins[1:], ends[-1]], strict=True)]
    return [
        TraceSlice(batch.model.name, begin, max(begin, end), {"batch": number})
        for number, (batch, begin, end) in enumerate(zip(batches, begins, cut, strict=True))
        if batch.asynchronous
    ]


def _first_work(batches: Sequence[TracedBatch], launches: Sequence[TraceSlice], work: Sequence[TraceSlice]) -> dict[int, int]:
    """Return when the device began with each batch, for batches with launches that the profiler saw."""
    launched_at = {call.args["correlation"]: call.begin for call in launches if "correlation" in call.args}
    begins, first = [_ns(batch.began) for batch in batches], dict[int, int]()
    for piece in work:
        at = launched_at.get(piece.args.get("correlation"))
        number = -1 if at is None else bisect_right(begins, at) - 1
        if at is not None and number >= 0 and at <= _ns(batches[number].launched):
            first[number] = min(first.get(number, piece.begin), piece.begin)
    return first


def _profiled_slices(
    profiled: Sequence[ProfilerEvent], marks: Sequence[ClockMark]
) -> tuple[defaultdict[str, list[TraceSlice]], defaultdict[str, list[TraceSlice]]]:
    """Return the work of the host and of the device by track. Both are empty if the profiler saw none of the marks."""
    host, device = defaultdict[str, list[TraceSlice]](list), defaultdict[str, list[TraceSlice]](list)
    shift = _clock_shift(profiled, marks)
    if shift is not None:
        for event in profiled:
            if event.cat in HOST and event.name != POLLS:
                host[HOST[event.cat]].append(_profiled_slice(event, shift))
            elif event.cat in DEVICE:
                device[f"{DEVICE[event.cat]}, stream {event.tid}"].append(_profiled_slice(event, shift))
    return host, device


def _profiled_slice(event: ProfilerEvent, shift: int) -> TraceSlice:
    begin = round(1000 * event.ts) + shift
    # A batch has hundreds of operations, and their arguments mean nothing outside the profiler.
    return TraceSlice(event.name, begin, begin + round(1000 * event.dur), {} if event.cat == OPERATION else event.args)


def _clock_shift(profiled: Sequence[ProfilerEvent], marks: Sequence[ClockMark]) -> int | None:
    """Return by how many nanoseconds the profiler's clock is behind, None without a mark. The shortest mark is the most exact."""
    seen = {event.name: event for event in profiled if event.cat == MARK}
    known = [mark for mark in marks if mark.name in seen]
    if not known:
        return None
    best = min(known, key=lambda mark: mark.after - mark.before)
    event = seen[best.name]
    return _ns((best.before + best.after) / 2) - round(1000 * (event.ts + event.dur / 2))


def _begun_within(slices: Iterable[TraceSlice], begin: int, end: int) -> list[TraceSlice]:
    """Return the slices that begin in this time; others belong to batches that were not recorded."""
    return [piece for piece in slices if begin <= piece.begin <= end]


def _disjoint(name: str, slices: Iterable[TraceSlice]) -> Iterator[Track]:
    """Spread slices over as many tracks as they need not to overlap."""
    tracks: list[list[TraceSlice]] = []
    for piece in sorted(slices, key=lambda piece: piece.begin):
        track = next((track for track in tracks if track[-1].end <= piece.begin), None)
        if track is None:
            tracks.append([piece])
        else:
            track.append(piece)
    for number, track in enumerate(tracks, start=1):
        yield Track(name if number == 1 else f"{name} ({number})", track)


def _nested(slices: Iterable[TraceSlice]) -> list[TraceSlice]:
    """Nest the calls of the engine's one thread. A call that ends after its caller, by a rounding of the clock, is cut."""
    nested: list[TraceSlice] = []
    callers: list[TraceSlice] = []
    for piece in sorted(slices, key=lambda piece: (piece.begin, -piece.end)):
        while callers and callers[-1].end <= piece.begin:
            callers.pop()
        callers.append(piece._replace(end=callers[-1].end) if callers and callers[-1].end < piece.end else piece)
        nested.append(callers[-1])
    return nested


def _drawn(piece: TraceSlice, pid: int, tid: int) -> Iterator[Event]:
    """Yield a slice, then its parts: if two slices begin together, viewers take the first as the outer slice."""
    times = {"ts": piece.begin / 1000, "dur": (piece.end - piece.begin) / 1000}
    yield {"ph": "X", "name": piece.name, "pid": pid, "tid": tid, **times, "args": piece.args}
    for part in piece.parts:
        yield from _drawn(part, pid, tid)


def _labelled(kind: str, pid: int, tid: int, name: str, index: int) -> list[Event]:
    """Return the events that name a process or a thread, and place it in the drawing."""
    labels = (("name", name), ("sort_index", index))
    return [{"ph": "M", "name": f"{kind}_{label}", "pid": pid, "tid": tid, "args": {label: value}} for label, value in labels]


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
