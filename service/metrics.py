"""Every time series of the service. Names, labels and buckets appear nowhere else.

Each process keeps its counts as plain lists in a Metrics of its own. A snapshot is plain data that crosses a channel; the
supervisor merges the snapshots of all processes, dead ones included, and a front renders the sum. Labels come from closed
sets: nothing a caller sends becomes one.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.errors import (
    STATUS,
    DeadlineExceeded,
    InvalidInput,
    InvalidModel,
    NoRoom,
    OutOfMemory,
    Overloaded,
    SessionConflict,
    SessionExpired,
    SessionLost,
    TooManySessions,
    Unavailable,
    UnknownModel,
    UnknownSession,
)

SECONDS = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

UNLOADED = ("unloaded", "unloaded")
"""Labels of requests to versions that are not served any more."""
OK, CUT_OFF, GONE = "ok", "cut_off", "client_gone"
"""Outcomes of a request that was answered, of one that a drain did not wait for, and of one whose caller did not wait."""
FAULTS = (*(kind.code for kind, status in STATUS.items() if status.http in (500, 503, 504)), CUT_OFF)
"""Outcomes that are the server's fault, whatever the caller did."""
REFUSALS = tuple(
    kind.code
    for kind in (
        *(Overloaded, DeadlineExceeded, UnknownModel, InvalidInput, OutOfMemory),
        *(UnknownSession, SessionExpired, SessionLost, SessionConflict, TooManySessions),
    )
)
CANCELLED_WHILE = ("waiting", "running")
SESSION_ENDS = ("ended", "deleted", "expired", "restarted", "unbegun", "unloaded")
"""By its last chunk, by DELETE, idle for too long, by another that begins under its name, as no chunk of it was answered, or
with its version of the model."""
SESSION_MOVES = ("host", "slot")
CHANGES = ("ok", InvalidModel.code, NoRoom.code, UnknownModel.code, Unavailable.code)
RESTARTS = (
    *(("engine", reason) for reason in ("ended", "hung", "failed", "device_lost")),
    *(("frontend", reason) for reason in ("ended", "failed")),
)
"""Only an engine has a pulse by which it is seen to hang, and a device to lose."""

Rows = list[tuple[tuple[str, ...], list[float]]]
Snapshot = dict[str, Rows]


class Series:
    """One metric: a list of numbers for each combination of label values."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self.values: dict[tuple[str, ...], list[float]] = {}

    def _at(self, labels: tuple[str, ...], width: int) -> list[float]:
        values = self.values.get(labels)
        if values is None:
            assert len(labels) == len(self.labels), f"{self.name} has the labels {self.labels}"
            values = self.values[labels] = [0.0] * width
        return values


class Counter(Series):
    """Only rises; the totals of ended processes are kept."""

    def start(self, *labels: str) -> None:
        """Be there from the beginning, at 0: in a series that is first seen at 1 Prometheus sees no rise."""
        self._at(labels, 1)

    def add(self, *labels: str, by: float = 1.0) -> None:
        self._at(labels, 1)[0] += by


class Gauge(Series):
    """A level of now; summed over the living processes, unless they are `alike`: then the largest is shown."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...] = (), *, alike: bool = False) -> None:
        super().__init__(name, help, labels)
        self.alike = alike

    def set(self, value: float, *labels: str) -> None:
        self._at(labels, 1)[0] = value

    def add(self, *labels: str, by: float = 1.0) -> None:
        self._at(labels, 1)[0] += by


class Histogram(Series):
    """Counts per bucket, then the sum of what was observed."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> None:
        super().__init__(name, help, labels)
        self.buckets = buckets

    def observe(self, value: float, *labels: str) -> None:
        values = self._at(labels, len(self.buckets) + 2)
        values[bisect_left(self.buckets, value)] += 1
        values[-1] += value


class Metrics:
    """The series, as attributes. Seconds and base units.

    `stage` is parse, encode or total (once a request), queue (once a sequence), stage_in, compute or stage_out (once a turn).
    """

    def __init__(self) -> None:
        model = ("model", "version")
        self.requests = Counter("seqserve_requests", "Requests for an answer, on any door, by outcome.", (*model, "outcome"))
        self.accepted = Counter(
            "seqserve_requests_accepted", "Requests for an answer, on any door, that a front began to read."
        )
        self.in_flight = Gauge("seqserve_requests_in_flight", "Requests accepted by a front and not yet answered.")
        self.sequences = Counter("seqserve_sequences", "Sequences answered.", model)
        self.tokens = Counter("seqserve_tokens", "Steps computed.", model)
        self.padding_avoided = Counter(
            "seqserve_padding_avoided_tokens", "Steps that padding each turn to its longest row would have added.", model
        )
        self.padded_tokens = Counter(
            "seqserve_padded_tokens", "Steps computed for nobody, as a CUDA graph has more room than the turn.", model
        )
        self.batches = Counter("seqserve_batches", "Turns run, by one CUDA graph or launch after launch.", (*model, "by"))
        self.stage_seconds = Histogram("seqserve_stage_seconds", "Time in each stage.", (*model, "stage"), SECONDS)
        self.sequence_seconds = Counter(
            "seqserve_sequence_seconds", "Time in the stages of turns, once for each sequence in them.", (*model, "stage")
        )
        self.failed_seconds = Counter("seqserve_failed_seconds", "Time of requests that were not answered.", model)
        self.last_answer = Gauge("seqserve_last_answer_time_seconds", "When a request was last answered.", model, alike=True)
        self.batch_sequences = Histogram("seqserve_batch_sequences", "Sequences in a turn.", model, ROWS)
        self.batch_tokens = Histogram("seqserve_batch_tokens", "Steps in a turn.", model, TOKENS)
        self.max_batch_sequences = Gauge("seqserve_max_batch_sequences", "Places for sequences in a turn.", alike=True)
        self.queue_depth = Gauge("seqserve_queue_depth", "Sequences of which no step has run.")
        self.sequences_waiting = Gauge("seqserve_sequences_waiting", "Of each model, those of which no step has run.", model)
        self.sequences_begun = Gauge(
            "seqserve_sequences_begun", "Sequences of which some steps have run and some wait for a turn."
        )
        self.state_slots = Gauge("seqserve_state_slots", "Places for states that are kept from turn to turn.", model)
        self.state_slots_used = Gauge("seqserve_state_slots_used", "Places in which a state is.", model)
        self.sessions = Gauge("seqserve_sessions", "Sessions that are open.")
        self.sessions_ended = Counter("seqserve_sessions_ended", "Sessions that are no longer open.", ("reason",))
        self.session_moves = Counter(
            "seqserve_session_moves", "States of sessions moved to the host, or back to a slot.", ("to",)
        )
        self.backlog_seconds = Gauge(
            "seqserve_backlog_seconds", "Predicted seconds of all that waits or runs in an engine.", ("engine",)
        )
        self.refused = Counter("seqserve_refused", "Requests the engine refused before they ran.", ("reason",))
        self.failed = Counter("seqserve_failed", "Requests on which the model raised.", model)
        self.cancelled = Counter(
            "seqserve_cancelled", "Requests given up: their caller left or their deadline passed.", ("while",)
        )
        self.rerun = Counter("seqserve_rerun", "Requests run again because their engine process ended.")
        self.channel_seconds = Histogram(
            "seqserve_channel_seconds", "From a front's send to the engine's receipt.", (), SECONDS
        )
        self.channel_bytes = Counter("seqserve_channel_bytes", "Bytes written to channels.", ("writer",))
        self.channel_writes = Counter("seqserve_channel_writes", "Write calls on channels.", ("writer",))
        self.restarts = Counter("seqserve_process_restarts", "Processes replaced.", ("process", "reason"))
        self.model_changes = Counter(
            "seqserve_model_changes",
            "Loads and unloads of a model while others are served, by what came of them.",
            ("outcome",),
        )
        self.ready = Gauge("seqserve_ready", "1 when requests are answered.")
        self.weight_bytes = Gauge("seqserve_model_weight_bytes", "Bytes of weights and tables on all devices.", model)
        self.graphs = Gauge("seqserve_graphs", "Sizes of turns captured as CUDA graphs.", model, alike=True)
        self.device_mallocs = Counter("seqserve_device_mallocs", "Times that memory was asked of the device (cudaMalloc).")
        self.device_allocations = Counter("seqserve_device_allocations", "Blocks of device memory handed out by its allocator.")
        self.device_reserved_bytes = Gauge("seqserve_device_reserved_bytes", "Device memory held by its allocator.")
        self.backend = Gauge(
            "seqserve_kernel_backend_info", "1 for each kernel backend in use.", (*model, "layer", "backend"), alike=True
        )

    def start(self, models: Iterable[tuple[str, str]]) -> None:
        """Show from the beginning, at 0, every count whose first rise must not be missed, for these models and versions.

        One process does it for all, as only sums are shown: a front, which knows the models.
        """
        for model in models:
            self.failed.start(*model)
            for outcome in (OK, *FAULTS):
                self.requests.start(*model, outcome)
        for reason in REFUSALS:
            self.refused.start(reason)
        for where in CANCELLED_WHILE:
            self.cancelled.start(where)
        for reason in SESSION_ENDS:
            self.sessions_ended.start(reason)
        for to in SESSION_MOVES:
            self.session_moves.start(to)
        for process, reason in RESTARTS:
            self.restarts.start(process, reason)
        for outcome in CHANGES:
            self.model_changes.start(outcome)
        self.rerun.start()
        self.accepted.start()

    def forget(self, model: str, version: str) -> None:
        """Remove the series of a version that is not served any more."""
        left = without(self.snapshot(), model, version)
        for one in self.series():
            one.values = {labels: list(values) for labels, values in left[one.name]}

    def series(self) -> Iterator[Series]:
        return (value for value in vars(self).values() if isinstance(value, Series))

    def snapshot(self) -> Snapshot:
        """The counts of this process as plain data."""
        return {one.name: [(labels, list(values)) for labels, values in one.values.items()] for one in self.series()}


def merged(snapshots: Iterable[Mapping[str, Rows]]) -> Snapshot:
    """The sum of snapshots, label by label; of a level that all processes have alike, the largest."""
    alike = {one.name for one in Metrics().series() if isinstance(one, Gauge) and one.alike}
    totals: dict[str, dict[tuple[str, ...], list[float]]] = {}
    for snapshot in snapshots:
        for name, rows in snapshot.items():
            total = totals.setdefault(name, {})
            together: Callable[[float, float], float] = max if name in alike else operator.add
            for labels, values in rows:
                key = tuple(labels)
                total[key] = [together(a, b) for a, b in zip(total[key], values, strict=True)] if key in total else list(values)
    return {name: list(total.items()) for name, total in totals.items()}


def without(snapshot: Mapping[str, Rows], model: str, version: str) -> Snapshot:
    """The counts without the series of a version. What became of its requests goes on to count, under UNLOADED."""
    metrics = Metrics()
    of_models = {one.name for one in metrics.series() if one.labels[:2] == ("model", "version")}
    left: Snapshot = {}
    for name, rows in snapshot.items():
        gone = [row for row in rows if name in of_models and tuple(row[0][:2]) == (model, version)]
        left[name] = [row for row in rows if row not in gone]
        if name == metrics.requests.name:
            left = merged([left, {name: [((*UNLOADED, labels[2]), values) for labels, values in gone]}])
    return left


def remains(snapshot: Mapping[str, Rows]) -> Snapshot:
    """What a process leaves behind when it ends: its totals, not its levels; what it had in flight was cut off."""
    metrics = Metrics()
    levels = {one.name for one in metrics.series() if isinstance(one, Gauge)}
    totals: Snapshot = {name: list(rows) for name, rows in snapshot.items() if name not in levels}
    cut_off = sum(values[0] for _, values in snapshot.get(metrics.in_flight.name, []))
    if not cut_off:
        return totals
    return merged([totals, {metrics.requests.name: [(("unknown", "unknown", CUT_OFF), [cut_off])]}])


def render(snapshot: Mapping[str, Rows], more: Iterable[Metric] = ()) -> bytes:
    """The snapshot, and more than that, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Exposition(snapshot, list(more)))
    return generate_latest(registry)


class _Exposition(Collector):
    """Hands a merged snapshot to prometheus-client."""

    def __init__(self, snapshot: Mapping[str, Rows], more: list[Metric]) -> None:
        self._snapshot = snapshot
        self._more = more

    def collect(self) -> Iterable[Metric]:
        return [*(self._family(one) for one in Metrics().series()), *self._more]

    def _family(self, one: Series) -> Metric:
        rows = self._snapshot.get(one.name, [])
        if isinstance(one, Histogram):
            histogram = HistogramMetricFamily(one.name, one.help, labels=one.labels)
            for labels, values in rows:
                histogram.add_metric(labels, list(_cumulative(one.buckets, values)), sum_value=values[-1])
            return histogram
        family = (CounterMetricFamily if isinstance(one, Counter) else GaugeMetricFamily)(one.name, one.help, labels=one.labels)
        for labels, values in rows:
            family.add_metric(labels, values[0])
        return family


def _cumulative(buckets: tuple[float, ...], values: list[float]) -> Iterator[tuple[str, float]]:
    total = 0.0
    for bound, count in zip((*buckets, float("inf")), values[:-1], strict=True):
        total += count
        yield ("+Inf" if bound == float("inf") else repr(float(bound)), total)
