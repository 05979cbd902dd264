"""Model statistics with the names and units of Triton Inference Server, for its dashboards and clients.

Queue and device times are summed over sequences, where Triton sums over requests: a request may have several sequences. As in
Triton, each sequence of a batch adds the whole duration of the batch.
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
MODEL_LABELS = ("model", "version")
FAILURE_REASONS = {
    **dict.fromkeys((kind.code for kind in (Overloaded, DeadlineExceeded, TooManySessions, Unavailable)), "REJECTED"),
    **dict.fromkeys((GONE, CUT_OFF), "CANCELED"),
    **dict.fromkeys((kind.code for kind in (InferenceFailed, OutOfMemory, EngineLost)), "BACKEND"),
}
"""Triton's reason for a failed request, by outcome. The reason for every other outcome is OTHER."""
STAGES = {"queue": "queue", "stage_in": "compute_input", "compute": "compute_infer", "stage_out": "compute_output"}
"""Triton's names of the stages."""
ValuesByLabels = dict[tuple[str, ...], float]


def families(snapshot: Mapping[str, Rows]) -> Iterator[Metric]:
    """Yield Triton's time series. They are untyped: their names lack the suffix `_total` of a Prometheus counter."""
    counts = _ModelCounts(snapshot)
    untyped: dict[str, tuple[str, ValuesByLabels]] = {
        "nv_inference_request_success": ("Requests answered.", counts.successes),
        "nv_inference_count": ("Sequences answered.", counts.sequences),
        "nv_inference_exec_count": ("Batches run.", counts.batches),
        "nv_inference_request_duration_us": (
            "Total duration of requests, successful or not.",
            _scaled(MICRO, counts.stage_seconds("total")),
        ),
        **{
            f"nv_inference_{name}_duration_us": (
                f"Total duration of the stage {stage}, summed over sequences.",
                _scaled(MICRO, counts.stage_seconds(stage)),
            )
            for stage, name in STAGES.items()
        },
    }
    for name, (help, values) in untyped.items():
        yield _with_values(UnknownMetricFamily(name, help, labels=MODEL_LABELS), values)
    failures = UnknownMetricFamily("nv_inference_request_failure", "Requests that failed.", labels=(*MODEL_LABELS, "reason"))
    yield _with_values(failures, counts.failures)
    pending = GaugeMetricFamily(
        "nv_inference_pending_request_count", "Sequences that wait for their first batch.", labels=MODEL_LABELS
    )
    yield _with_values(pending, counts.values(counts.metrics.sequences_waiting.name))


def statistics(snapshot: Mapping[str, Rows], models: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return Triton's ModelStatistics of the given models, each a name and a version."""
    counts = _ModelCounts(snapshot)
    return [_model_statistics(counts, model) for model in models]


def _with_values(family: UnknownMetricFamily | GaugeMetricFamily, values: ValuesByLabels) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _model_statistics(counts: _ModelCounts, model: tuple[str, str]) -> dict[str, Any]:
    """Return the statistics of one model. Times by batch size are not available."""

    def duration(values: ValuesByLabels, count: float) -> dict[str, int]:
        return {"count": round(count), "ns": round(NANO * values.get(model, 0.0))}

    sequences = counts.sequences.get(model, 0.0)
    failures = sum(value for labels, value in counts.failures.items() if labels[:2] == model)
    failed_seconds = counts.failed_seconds.get(model, 0.0)
    success_seconds = counts.stage_seconds("total").get(model, 0.0) - failed_seconds
    name, version = model
    return {
        "name": name,
        "version": version,
        "last_inference": round(1000 * counts.values(counts.metrics.last_answer.name).get(model, 0.0)),
        "inference_count": round(sequences),
        "execution_count": round(counts.batches.get(model, 0.0)),
        "inference_stats": {
            "success": duration({model: success_seconds}, counts.successes.get(model, 0.0)),
            "fail": duration({model: failed_seconds}, failures),
            **{triton_name: duration(counts.stage_seconds(stage), sequences) for stage, triton_name in STAGES.items()},
        },
        "batch_stats": [],
    }


class _ModelCounts:
    """The counts of a snapshot, by model and version."""

    def __init__(self, snapshot: Mapping[str, Rows]) -> None:
        self.metrics = Metrics()
        self._snapshot = snapshot
        requests = self._series(self.metrics.requests.name)
        self.successes: ValuesByLabels = {
            (model, version): values[0] for (model, version, outcome), values in requests if outcome == OK
        }
        self.failures: ValuesByLabels = {}
        for (model, version, outcome), values in requests:
            if outcome != OK:
                labels = (model, version, FAILURE_REASONS.get(outcome, "OTHER"))
                self.failures[labels] = self.failures.get(labels, 0.0) + values[0]
        self.sequences = self.values(self.metrics.sequences.name)
        self.batches = self._sums(self.metrics.batches.name)
        self.failed_seconds = self.values(self.metrics.failed_seconds.name)

    def values(self, name: str) -> ValuesByLabels:
        """Return a series that has no labels other than model and version."""
        return {tuple(labels): values[0] for labels, values in self._series(name)}

    def stage_seconds(self, stage: str) -> ValuesByLabels:
        """Return the seconds in a stage. Each sequence of a batch adds the whole duration of the batch."""
        seconds = self._series(self.metrics.stage_seconds.name)
        return {(model, version): values[-1] for (model, version, label), values in seconds if label == stage}

    def _sums(self, name: str) -> ValuesByLabels:
        """Return a series summed over all labels other than model and version."""
        sums: ValuesByLabels = {}
        for (model, version, *_), values in self._series(name):
            sums[model, version] = sums.get((model, version), 0.0) + values[0]
        return sums

    def _series(self, name: str) -> Rows:
        return [(labels, values) for labels, values in self._snapshot.get(name, []) if tuple(labels[:2]) != UNLOADED]


def _scaled(unit: float, seconds: ValuesByLabels) -> ValuesByLabels:
    """Return durations in whole units."""
    return {labels: float(round(unit * value)) for labels, value in seconds.items()}
