"""The answer of /metrics on every port: the metrics of all processes in one of Prometheus' formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.registry import Collector

from service import triton_statistics
from service.metrics import EXAMPLES, Counter, Example, Histogram, Metrics, Rows, Series

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Exposition(NamedTuple):
    """The text of /metrics and its media type."""

    text: bytes
    media_type: str


def expose(snapshot: Mapping[str, Rows], accept: str) -> Exposition:
    """Return a snapshot in Prometheus' text format, or in that of OpenMetrics if the Accept header names it."""
    openmetrics = accepts_openmetrics(accept)
    text = render(snapshot, triton_statistics.families(snapshot), openmetrics=openmetrics)
    return Exposition(text, OPENMETRICS if openmetrics else PROMETHEUS)


def accepts_openmetrics(accept: str) -> bool:
    """Return whether an Accept header names the format, as Prometheus' does. A version that we do not write is answered with ours."""
    for part in accept.lower().split(","):
        media_type, *parameters = [value.strip() for value in part.split(";")]
        if media_type == OPENMETRICS.partition(";")[0]:
            return not any(re.fullmatch(r"q\s*=\s*0(\.0*)?", parameter) for parameter in parameters)
    return False


def render(snapshot: Mapping[str, Rows], more: Iterable[Metric] = (), *, openmetrics: bool = False) -> bytes:
    """Return the snapshot and `more` metrics in Prometheus' text format, or in that of OpenMetrics, which has the examples too."""
    registry = CollectorRegistry()
    registry.register(_Exposition(snapshot, list(more)))
    text: bytes = openmetrics_text(registry) if openmetrics else generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


class _Exposition(Collector):
    """Passes a merged snapshot to prometheus-client."""

    def __init__(self, snapshot: Mapping[str, Rows], more: list[Metric]) -> None:
        self._snapshot = snapshot
        self._more = more

    def collect(self) -> Iterable[Metric]:
        return [*(self._family(series) for series in Metrics().series()), *self._more]

    def _family(self, series: Series) -> Metric:
        rows = self._snapshot.get(series.name, [])
        if isinstance(series, Histogram):
            histogram = HistogramMetricFamily(series.name, series.help, labels=series.labels)
            examples = _examples(self._snapshot.get(series.name + EXAMPLES, []))
            for labels, values in rows:
                buckets = [
                    (bound, count)
                    if (example := examples.get((tuple(labels), bucket))) is None
                    else (bound, count, Exemplar({"trace_id": example.trace}, example.value, example.time))
                    for bucket, (bound, count) in enumerate(_cumulative(series.buckets, values))
                ]
                histogram.add_metric(labels, buckets, sum_value=values[-1])
            return histogram
        family = (CounterMetricFamily if isinstance(series, Counter) else GaugeMetricFamily)(
            series.name, series.help, labels=series.labels
        )
        for labels, values in rows:
            family.add_metric(labels, values[0])
        return family


def _examples(rows: Rows) -> dict[tuple[tuple[str, ...], int], Example]:
    """Return the newest example of each bucket, by labels and bucket."""
    newest: dict[tuple[tuple[str, ...], int], Example] = {}
    for (*labels, bucket, trace), (value, noted) in rows:
        key = tuple(labels), int(bucket)
        if key not in newest or noted > newest[key].time:
            newest[key] = Example(trace, value, noted)
    return newest


def _cumulative(buckets: tuple[float, ...], values: list[float]) -> Iterator[tuple[str, float]]:
    total = 0.0
    for bound, count in zip((*buckets, float("inf")), values[:-1], strict=True):
        total += count
        yield ("+Inf" if bound == float("inf") else repr(float(bound)), total)
