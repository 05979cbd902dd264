"""Every time series of the service. Names, labels and buckets appear nowhere else.

Each process counts in plain lists of a separate `Metrics`. A snapshot is plain data that crosses a channel. The supervisor merges the
snapshots of all processes, including the totals of processes that ended, and a frontend renders the sum. Label values come from
closed sets: no value from a client becomes a label.
"""

from __future__ import annotations

import gc
import operator
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from service.errors import (
    STATUS,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    InvalidModel,
    NoRoom,
    OutOfMemory,
    Overloaded,
    SessionConflict,
    SessionExpired,
    SessionLost,
    SessionUnreachable,
    TooManySessions,
    Unauthorized,
    Unavailable,
    UnknownModel,
    UnknownSession,
)

SECONDS = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

UNLOADED = ("unloaded", "unloaded")
"""Labels of requests to versions that are no longer served."""
OK, CUT_OFF, GONE = "ok", "cut_off", "client_gone"
"""Outcomes of a request: it was answered, the drain did not wait for it, or its client disconnected."""
FAULTS = (*(kind.code for kind, status in STATUS.items() if status.http in (500, 503, 504)), CUT_OFF)
"""Outcomes for which the server is responsible, not the client."""
REFUSALS = tuple(
    kind.code
    for kind in (
        *(Overloaded, DeadlineExceeded, UnknownModel, InvalidInput, OutOfMemory),
        *(UnknownSession, SessionExpired, SessionLost, SessionConflict, SessionUnreachable, TooManySessions),
    )
)
MEMORY = "memory"
"""Reason of a refusal by a frontend: the memory limit of the container is nearly used up."""
DENIALS = (Unauthorized.code, Forbidden.code)
CLOSED_FOR = (
    *("idle", "slow_request", "slow_reader", "too_many", "invalid_request", "headers_too_large", "overloaded"),
    *("too_large", "too_many_frames", "too_many_pings"),
    *("unauthorized", "forbidden"),
)
"""Why a frontend closes a connection before the client does."""
CANCELLED_WHILE = ("waiting", "running")
SESSION_ENDS = (
    *("ended", "deleted", "expired", "restarted", "unbegun", "unloaded"),
    *("moved", "lost", "taken_over"),
)
"""A session ends with its last chunk, by DELETE, when it is idle for too long, when a new session begins under its name, when its first
chunk is not answered, or when its model version is unloaded. On this replica, it also ends when another replica may take it, when its
client learns that its newest state was lost, and when another replica took it over because this one did not reach the session store."""
SESSION_MOVES = ("host", "slot")
SAVES = ("saved", "failed", "skipped", "refused")
"""skipped: a newer state of the session was already waiting. refused: another replica owns the session."""
TAKES = ("new", "taken", "absent", "ended", "newer", "away")
"""What the session store said of a session that is not open here: it begins; its state was saved; there is none; it ended without its
client's knowledge; a later version of the service saved it; the store does not answer, or its owner does not let go of it."""
CHANGES = ("ok", InvalidModel.code, NoRoom.code, UnknownModel.code, Unavailable.code, GONE)
RESTARTS = (
    *(("engine", reason) for reason in ("ended", "hung", "failed", "device_lost")),
    *(("frontend", reason) for reason in ("ended", "hung", "failed")),
    *((process, reason) for process in ("tracer", "store") for reason in ("ended", "hung", "failed")),
)
"""Only an engine has a device that can fail."""

ENGINE_WORK = ("requests", "session_call", "store", "trace", "cancel", "release", "batch", "answer")
"""The work of an engine when it met an unexpected exception: it handled a message of a frontend or of the session store, formed a batch, or
answered requests."""

EXAMPLES = "_examples"
"""Suffix of a histogram's name in a snapshot, for rows with its examples. Their labels are the histogram's labels, the bucket and the
trace; their values are the observed value and the Unix time."""
TRACED_AS = ("recorded", "over_limit", "dropped")
"""A frontend sends a traced request to the tracer. It does not if too many are traced, or if the tracer does not keep up."""
SPANS_AS = ("exported", "failed", "dropped")
"""The receiver takes spans or does not. Spans that wait for a slow receiver are dropped beyond a limit."""

Rows = list[tuple[tuple[str, ...], list[float]]]
Snapshot = dict[str, Rows]


class Values(dict[tuple[str, ...], list[float]]):
    """The numbers of a metric by label values: `width` zeros at first."""

    def __init__(self, name: str, labels: tuple[str, ...], width: int) -> None:
        self._name, self._labels, self._width = name, labels, width

    def __missing__(self, labels: tuple[str, ...]) -> list[float]:
        assert len(labels) == len(self._labels), f"{self._name} has the labels {self._labels}"
        self[labels] = values = [0.0] * self._width
        return values


class Series:
    """One metric: a list of numbers for each combination of label values."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...] = (), width: int = 1) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self.values = Values(name, labels, width)


class Counter(Series):
    """A number that only rises. The totals of processes that ended are kept. starts: label values that are shown from the start."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...] = (), starts: Iterable[tuple[str, ...]] = ()) -> None:
        super().__init__(name, help, labels)
        self.starts = list(starts)

    def start(self, *labels: str) -> None:
        """Show the series at 0 from the start. Prometheus sees no increase in a series that first appears at 1."""
        _ = self.values[labels]

    def add(self, *labels: str, by: float = 1.0) -> None:
        self.values[labels][0] += by

    def raise_to(self, total: float, *labels: str) -> None:
        """Take over a total that this process counts elsewhere."""
        self.values[labels][0] = total


class Gauge(Series):
    """A current level. `/metrics` shows the sum over all live processes, or the largest value of a gauge that is `alike` in all of them."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...] = (), *, alike: bool = False) -> None:
        super().__init__(name, help, labels)
        self.alike = alike

    def set(self, value: float, *labels: str) -> None:
        self.values[labels][0] = value

    def add(self, *labels: str, by: float = 1.0) -> None:
        self.values[labels][0] += by


class Example(NamedTuple):
    """A traced request in a bucket of a histogram. time: Unix time."""

    trace: str
    value: float
    time: float


class Histogram(Series):
    """Counts per bucket, followed by the sum of the observed values."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> None:
        super().__init__(name, help, labels, len(buckets) + 2)
        self.buckets = buckets
        self.examples: dict[tuple[tuple[str, ...], int], Example] = {}
        """By label values and bucket."""

    def observe(self, value: float, *labels: str) -> None:
        values = self.values[labels]
        values[bisect_left(self.buckets, value)] += 1
        values[-1] += value

    def observe_often(self, value: float, count: int, *labels: str) -> None:
        """Observe a value that `count` requests have in common."""
        values = self.values[labels]
        values[bisect_left(self.buckets, value)] += count
        values[-1] += value * count

    def note_trace(self, trace: str, values: Iterable[tuple[tuple[str, ...], float]]) -> None:
        """Keep a traced request as an example of values that are observed anyway: the newest for each bucket. values: by labels."""
        now = datetime.now(UTC).timestamp()
        for labels, value in values:
            self.examples[labels, bisect_left(self.buckets, value)] = Example(trace, value, now)

    def observe_all(self, observed: Sequence[float], *labels: str) -> None:
        """Observe many values at once."""
        values, ascending, below = self.values[labels], sorted(observed), 0
        for bucket, limit in enumerate(self.buckets):
            end = bisect_right(ascending, limit, below)
            values[bucket] += end - below
            below = end
        values[len(self.buckets)] += len(observed) - below
        values[-1] += sum(observed)


class Metrics:
    """All series, as attributes. Units are seconds and other base units.

    The label `stage` is parse, channel, reply, encode or total (once per request), or queue, stage_in, device_wait, compute or stage_out
    (once per sequence, in every batch that runs some of its steps). The stages follow each other without a gap: for requests with one
    sequence that runs in one batch, the means of the stages add up to the mean of total.
    """

    def __init__(self) -> None:
        self._folds: list[Callable[[], None]] = []
        model = ("model", "version")
        self.requests = Counter("seqserve_requests", "Inference requests over all protocols, by outcome.", (*model, "outcome"))
        self.accepted = Counter(
            "seqserve_requests_accepted",
            "Inference requests over all protocols that a frontend has decoded or refused.",
            starts=[()],
        )
        self.in_flight = Gauge("seqserve_requests_in_flight", "Requests that a frontend accepted and has not answered.")
        self.sequences = Counter("seqserve_sequences", "Sequences answered.", model)
        self.tokens = Counter("seqserve_tokens", "Time steps computed.", model)
        self.padding_avoided = Counter(
            "seqserve_padding_avoided_tokens",
            "Time steps that padding each batch to its longest sequence would have added.",
            model,
        )
        self.padded_tokens = Counter(
            "seqserve_padded_tokens", "Time steps computed without use, because a CUDA graph is larger than its batch.", model
        )
        self.batches = Counter(
            "seqserve_batches", "Batches run, as a CUDA graph, in a resident kernel or launch by launch.", (*model, "by")
        )
        self.stage_seconds = Histogram("seqserve_stage_seconds", "Time in each stage.", (*model, "stage"), SECONDS)
        self.failed_seconds = Counter("seqserve_failed_seconds", "Time of requests that ended with an error.", model)
        self.last_answer = Gauge(
            "seqserve_last_answer_time_seconds", "Unix time of the last successful reply.", model, alike=True
        )
        self.batch_sequences = Histogram("seqserve_batch_sequences", "Sequences per batch.", model, ROWS)
        self.batch_tokens = Histogram("seqserve_batch_tokens", "Time steps per batch.", model, TOKENS)
        self.max_batch_sequences = Gauge("seqserve_max_batch_sequences", "Largest number of sequences in a batch.", alike=True)
        self.queue_depth = Gauge("seqserve_queue_depth", "Sequences of which no time step has run.")
        self.sequences_waiting = Gauge(
            "seqserve_sequences_waiting", "Sequences of each model of which no time step has run.", model
        )
        self.sequences_begun = Gauge(
            "seqserve_sequences_begun", "Sequences of which some time steps have run and others wait for a batch."
        )
        self.state_slots = Gauge("seqserve_state_slots", "State slots on the device.", model)
        self.state_slots_used = Gauge("seqserve_state_slots_used", "State slots that hold a state.", model)
        self.sessions = Gauge("seqserve_sessions", "Open sessions.")
        self.sessions_ended = Counter(
            "seqserve_sessions_ended", "Sessions that ended, by reason.", ("reason",), zip(SESSION_ENDS)
        )
        self.session_moves = Counter(
            "seqserve_session_moves",
            "Session states moved to the host, or back to a slot on the device.",
            ("to",),
            zip(SESSION_MOVES),
        )
        self.session_saves = Counter(
            "seqserve_session_saves", "States sent to the session store, by outcome.", ("outcome",), zip(SAVES)
        )
        self.session_save_seconds = Histogram(
            "seqserve_session_save_seconds", "Time from the answer to a chunk until its state is saved.", (), SECONDS
        )
        self.session_takes = Counter(
            "seqserve_session_takes",
            "Questions for a session that was not open here to the session store, by outcome.",
            ("outcome",),
            zip(TAKES),
        )
        self.session_take_seconds = Histogram(
            "seqserve_session_take_seconds",
            "Time until a saved session can continue here, its release by another replica included.",
            (),
            SECONDS,
        )
        self.session_store_up = Gauge("seqserve_session_store_up", "Whether the session store answers: 1 or 0.")
        self.sessions_not_saved = Counter(
            "seqserve_sessions_not_saved", "Sessions that were not saved before their replica ended.", starts=[()]
        )
        self.backlog_seconds = Gauge(
            "seqserve_backlog_seconds", "Predicted time of all work that waits or runs in an engine.", ("engine",)
        )
        self.device_busy_seconds = Counter(
            "seqserve_device_busy_seconds", "Time in which the device of an engine ran batches.", ("engine",)
        )
        self.denied = Counter(
            "seqserve_denied", "Requests that were refused for their key, host or origin.", ("reason",), zip(DENIALS)
        )
        key = ("tenant", "key")
        self.key_requests = Counter("seqserve_key_requests", "Valid requests of a key, those beyond its quotas included.", key)
        self.key_tokens = Counter("seqserve_key_tokens", "Time steps in the valid requests of a key.", key)
        self.quota_exceeded = Counter(
            "seqserve_quota_exceeded", "Requests that exceeded a quota of their key.", (*key, "quota")
        )
        self.refused = Counter(
            "seqserve_refused",
            "Requests that an engine, or a frontend for want of memory, refused before they ran.",
            ("reason",),
            zip((*REFUSALS, MEMORY)),
        )
        self.retries_discouraged = Counter(
            "seqserve_retries_discouraged", "Refusals for overload after which the client should not retry."
        )
        self.failed = Counter("seqserve_failed", "Requests for which the model raised an exception.", model)
        self.engine_errors = Counter(
            "seqserve_engine_errors",
            "Unexpected exceptions in an engine, which are bugs of the service, by what the engine did.",
            ("work",),
            zip(ENGINE_WORK),
        )
        self.cancelled = Counter(
            "seqserve_cancelled",
            "Requests cancelled because the client disconnected or the deadline passed.",
            ("while",),
            zip(CANCELLED_WHILE),
        )
        self.traced_requests = Counter(
            "seqserve_traced_requests",
            "Requests that a frontend chose to trace, by what became of them.",
            ("outcome",),
            zip(TRACED_AS),
        )
        self.spans = Counter(
            "seqserve_spans", "Spans of traced requests and batches, by what became of them.", ("outcome",), zip(SPANS_AS)
        )
        self.rerun = Counter("seqserve_rerun", "Requests run again because their engine ended.", starts=[()])
        self.connections_closed = Counter(
            "seqserve_connections_closed",
            "Connections that a frontend closed before the client did.",
            ("reason",),
            zip(CLOSED_FOR),
        )
        self.channel_bytes = Counter("seqserve_channel_bytes", "Bytes written to channels.", ("writer",))
        self.channel_writes = Counter("seqserve_channel_writes", "Write calls on channels.", ("writer",))
        self.gc_seconds = Histogram(
            "seqserve_gc_seconds",
            "Time of Python's garbage collections, in which a process does nothing else.",
            ("process",),
            SECONDS,
        )
        self.memory_limit_used = Gauge(
            "seqserve_memory_limit_used_ratio",
            "Share of the container's memory limit that is in use, without file pages; 0 without a limit.",
            alike=True,
        )
        self.processes = Gauge("seqserve_processes", "Frontends and engines that the service keeps running.", ("process",))
        self.stale_processes = Gauge(
            "seqserve_stale_processes", "Processes that were too late for this scrape: their values are from an earlier one."
        )
        self.restarts = Counter("seqserve_process_restarts", "Processes restarted, by reason.", ("process", "reason"), RESTARTS)
        self.model_changes = Counter(
            "seqserve_model_changes",
            "Loads and unloads of models while the service runs, by outcome.",
            ("outcome",),
            zip(CHANGES),
        )
        self.ready = Gauge("seqserve_ready", "1 while the service answers requests, otherwise 0.")
        self.weight_bytes = Gauge("seqserve_model_weight_bytes", "Bytes of weights and tables on all devices.", model)
        self.graphs = Gauge("seqserve_graphs", "Batch sizes captured as CUDA graphs.", model, alike=True)
        self.device_mallocs = Counter("seqserve_device_mallocs", "Calls of cudaMalloc.")
        self.device_allocations = Counter(
            "seqserve_device_allocations", "Blocks of device memory that the allocator handed out."
        )
        self.device_reserved_bytes = Gauge("seqserve_device_reserved_bytes", "Device memory that the allocator holds.")
        self.backend = Gauge(
            "seqserve_kernel_backend_info", "1 for each kernel backend in use.", (*model, "layer", "backend"), alike=True
        )

    def observe_collections(self, process: str) -> None:
        """Observe every garbage collection of this process from now on."""
        began = 0.0
        self.gc_seconds.observe_often(0.0, 0, process)  # a collection while the series are read must not add one

        def observe(phase: Literal["start", "stop"], info: dict[str, int]) -> None:
            nonlocal began
            now = time.perf_counter()
            if phase == "start":
                began = now
            else:
                self.gc_seconds.observe(now - began, process)

        gc.callbacks.append(observe)

    def start(self, models: Iterable[tuple[str, str]]) -> None:
        """Show at 0 every count whose first increase matters to alerts, for these models and versions.

        Only sums are shown, so one process does it for all: a frontend, which knows the models.
        """
        for model in models:
            self.failed.start(*model)
            for outcome in (OK, *FAULTS):
                self.requests.start(*model, outcome)
        for series in self.series():
            if isinstance(series, Counter):
                for labels in series.starts:
                    series.start(*labels)

    def forget(self, model: str, version: str) -> None:
        """Remove the series of a version that is no longer served."""
        remaining = without(self.snapshot(), model, version)
        for series in self.series():
            series.values.clear()
            series.values.update((labels, list(values)) for labels, values in remaining[series.name])
            if isinstance(series, Histogram):
                series.examples = {key: value for key, value in series.examples.items() if key[0][:2] != (model, version)}

    def before_snapshot(self, fold: Callable[[], None]) -> None:
        """Call `fold` before every snapshot. It adds what was counted elsewhere, where each count must cost next to nothing."""
        self._folds.append(fold)

    def series(self) -> Iterator[Series]:
        return (value for value in vars(self).values() if isinstance(value, Series))

    def snapshot(self) -> Snapshot:
        """Return the counts of this process as plain data."""
        for fold in self._folds:
            fold()
        snapshot: Snapshot = {
            series.name: [(labels, list(values)) for labels, values in series.values.items()] for series in self.series()
        }
        for series in self.series():
            if isinstance(series, Histogram) and series.examples:
                snapshot[series.name + EXAMPLES] = [
                    ((*labels, str(bucket), example.trace), [example.value, example.time])
                    for (labels, bucket), example in series.examples.items()
                ]
        return snapshot


def stale(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot that counts all processes of an earlier one as stale: the supervisor, the frontends and the engines."""
    metrics = Metrics()
    children = sum(values[0] for _, values in snapshot.get(metrics.processes.name, []))
    return snapshot | {metrics.stale_processes.name: [((), [1 + children])]}


def merged(snapshots: Iterable[Mapping[str, Rows]]) -> Snapshot:
    """Return the sum of snapshots per label set, or the largest value of a gauge that is alike in all processes."""
    alike = {series.name for series in Metrics().series() if isinstance(series, Gauge) and series.alike}
    totals: dict[str, dict[tuple[str, ...], list[float]]] = {}
    for snapshot in snapshots:
        for name, rows in snapshot.items():
            total = totals.setdefault(name, {})
            together: Callable[[float, float], float] = max if name in alike else operator.add
            for labels, values in rows:
                key = tuple(labels)
                if name.endswith(EXAMPLES):
                    total[key] = list(values)
                    continue
                total[key] = [together(a, b) for a, b in zip(total[key], values, strict=True)] if key in total else list(values)
    return {name: list(total.items()) for name, total in totals.items()}


def without(snapshot: Mapping[str, Rows], model: str, version: str) -> Snapshot:
    """Return the snapshot without the series of a version. The outcomes of its requests are kept under UNLOADED."""
    metrics = Metrics()
    of_models = {series.name for series in metrics.series() if series.labels[:2] == ("model", "version")}
    of_models |= {name + EXAMPLES for name in of_models}
    remaining: Snapshot = {}
    for name, rows in snapshot.items():
        removed = [row for row in rows if name in of_models and tuple(row[0][:2]) == (model, version)]
        remaining[name] = [row for row in rows if row not in removed]
        if name == metrics.requests.name:
            remaining = merged([remaining, {name: [((*UNLOADED, labels[2]), values) for labels, values in removed]}])
    return remaining


def remains(snapshot: Mapping[str, Rows]) -> Snapshot:
    """Return what remains of a process that ended: its counters and histograms. Its requests in flight count as cut off."""
    metrics = Metrics()
    levels = {series.name for series in metrics.series() if isinstance(series, Gauge)}
    totals: Snapshot = {
        name: list(rows) for name, rows in snapshot.items() if name not in levels and not name.endswith(EXAMPLES)
    }
    cut_off = sum(values[0] for _, values in snapshot.get(metrics.in_flight.name, []))
    if not cut_off:
        return totals
    return merged([totals, {metrics.requests.name: [(("unknown", "unknown", CUT_OFF), [cut_off])]}])
