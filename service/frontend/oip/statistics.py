"""The same counts by the names and in the units that Triton Inference Server has for them, so that its dashboards and clients read them.

What Triton counts by request is here counted by sequence where a request may have several: the times in a queue and on a device. As there,
each sequence of a turn counts the whole of the turn's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily

from service.errors import (
    DeadlineExceeded,
    EngineLost,
    InferenceFailed,
    OutOfMemory,
    Overloaded,
    TooManySessions,
    Unavailable,
)
from service.metrics import CUT_OFF, GONE, OK, UNLOADED, Metrics, Rows

MICRO, NANO = 1e6, 1e9
MODEL = ("model", "version")
REASONS = {
    **dict.fromkeys((kind.code for kind in (Overloaded, DeadlineExceeded, TooManySessions, Unavailable)), "REJECTED"),
    **dict.fromkeys((GONE, CUT_OFF), "CANCELED"),
    **dict.fromkeys((kind.code for kind in (InferenceFailed, OutOfMemory, EngineLost)), "BACKEND"),
}
"""Of a failure, by its outcome; of every other it is OTHER."""
STAGES = {"queue": "queue", "stage_in": "compute_input", "compute": "compute_infer", "stage_out": "compute_output"}
"""Triton's names."""
Values = dict[tuple[str, ...], float]
"""By labels."""


def families(snapshot: Mapping[str, Rows]) -> Iterator[Metric]:
    """Triton's time series. They have no `_total` in their names, and so no type that Prometheus would call a counter."""
    counts = _Counts(snapshot)
    plain: dict[str, tuple[str, Values]] = {
        "nv_inference_request_success": ("Requests answered.", counts.successes),
        "nv_inference_count": ("Sequences answered.", counts.sequences),
        "nv_inference_exec_count": ("Turns run.", counts.batches),
        "nv_inference_request_duration_us": ("Time of requests, whatever came of them.", _in(MICRO, counts.stage("total"))),
        **{
            f"nv_inference_{name}_duration_us": (f"Time of sequences: {stage}.", _in(MICRO, counts.stage(stage)))
            for stage, name in STAGES.items()
        },
    }
    for name, (help, values) in plain.items():
        yield _filled(UnknownMetricFamily(name, help, labels=MODEL), values)
    failures = UnknownMetricFamily("nv_inference_request_failure", "Requests that failed.", labels=(*MODEL, "reason"))
    yield _filled(failures, counts.failures)
    waiting = GaugeMetricFamily("nv_inference_pending_request_count", "Sequences of which no step has run.", labels=MODEL)
    yield _filled(waiting, counts.of(counts.metrics.sequences_waiting.name))


def statistics(snapshot: Mapping[str, Rows], models: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Triton's model_stats of these, each a name and a version."""
    counts = _Counts(snapshot)
    return [_statistics(counts, model) for model in models]


def _filled(family: UnknownMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _statistics(counts: _Counts, model: tuple[str, str]) -> dict[str, Any]:
    """One entry, which has no times by batch size."""

    def duration(values: Values, count: float) -> dict[str, int]:
        return {"count": round(count), "ns": round(NANO * values.get(model, 0.0))}

    sequences = counts.sequences.get(model, 0.0)
    failed = sum(value for labels, value in counts.failures.items() if labels[:2] == model)
    failing = counts.failing_seconds.get(model, 0.0)
    succeeding: Values = {model: counts.stage("total").get(model, 0.0) - failing}
    name, version = model
    return {
        "name": name,
        "version": version,
        "last_inference": round(1000 * counts.of(counts.metrics.last_answer.name).get(model, 0.0)),
        "inference_count": round(sequences),
        "execution_count": round(counts.batches.get(model, 0.0)),
        "inference_stats": {
            "success": duration(succeeding, counts.successes.get(model, 0.0)),
            "fail": duration({model: failing}, failed),
            **{theirs: duration(counts.stage(stage), sequences) for stage, theirs in STAGES.items()},
        },
        "batch_stats": [],
    }


class _Counts:
    """The counts of a snapshot, by model and version."""

    def __init__(self, snapshot: Mapping[str, Rows]) -> None:
        self.metrics = Metrics()
        self._snapshot = snapshot
        requests = self._rows(self.metrics.requests.name)
        self.successes: Values = {
            (model, version): values[0] for (model, version, outcome), values in requests if outcome == OK
        }
        self.failures: Values = {}
        for (model, version, outcome), values in requests:
            if outcome != OK:
                labels = (model, version, REASONS.get(outcome, "OTHER"))
                self.failures[labels] = self.failures.get(labels, 0.0) + values[0]
        self.sequences = self.of(self.metrics.sequences.name)
        self.batches = self._summed(self.metrics.batches.name)
        self.failing_seconds = self.of(self.metrics.failed_seconds.name)

    def of(self, name: str) -> Values:
        """A series that is by model and version only."""
        return {tuple(labels): values[0] for labels, values in self._rows(name)}

    def stage(self, stage: str) -> Values:
        """Seconds in a stage: of requests or sequences, each for itself, and of turns, once for each sequence in them."""
        name = (self.metrics.stage_seconds if stage in ("queue", "total") else self.metrics.sequence_seconds).name
        return {(model, version): values[-1] for (model, version, one), values in self._rows(name) if one == stage}

    def _summed(self, name: str) -> Values:
        found: Values = {}
        for (model, version, *_), values in self._rows(name):
            found[model, version] = found.get((model, version), 0.0) + values[0]
        return found

    def _rows(self, name: str) -> Rows:
        return [(labels, values) for labels, values in self._snapshot.get(name, []) if tuple(labels[:2]) != UNLOADED]


def _in(unit: float, seconds: Values) -> Values:
    """Whole ones."""
    return {labels: float(round(unit * value)) for labels, value in seconds.items()}
