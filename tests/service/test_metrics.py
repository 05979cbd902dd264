"""Counts of many processes become one exposition that Prometheus reads."""

from __future__ import annotations

import gc
from io import StringIO
from itertools import pairwise

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_fd_to_metric_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from service.errors import STATUS, NoRoom, Unsupported
from service.exposition import accepts_openmetrics, render
from service.metrics import (
    EXAMPLES,
    FAULTS,
    SECONDS,
    Counter,
    Gauge,
    Histogram,
    Metrics,
    Snapshot,
    merged,
    remains,
    without,
)
from tests.serving import Server

MODEL = ("words", "1")
STAGE = "seqserve_stage_seconds"


def busy(scale: float = 1.0) -> Metrics:
    """Every series with something in it."""
    metrics = Metrics()
    for one in metrics.series():
        labels = tuple(f"a {label}" for label in one.labels)
        if isinstance(one, Counter):
            one.add(*labels, by=2.0 * scale)
        elif isinstance(one, Gauge):
            one.set(3.0 * scale, *labels)
        elif isinstance(one, Histogram):
            for value in (0.0, one.buckets[0], one.buckets[-1], 1e9):
                one.observe(value, *labels)
    return metrics


def samples(snapshot: Snapshot) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(render(snapshot).decode()) for sample in family.samples]


def value(snapshot: Snapshot, name: str, **labels: str) -> float:
    return the_one(samples(snapshot), name, **labels)


def the_one(shown: list[Sample], name: str, **labels: str) -> float:
    [found] = [one.value for one in shown if one.name == name and labels.items() <= one.labels.items()]
    return found


def test_counts_of_processes_are_merged_by_labels() -> None:
    """Gauges go up and down. A started counter keeps its count."""
    one, other = Metrics(), Metrics()
    one.sequences.add(*MODEL)
    one.sequences.start(*MODEL)
    one.sequences.add(*MODEL, by=2.5)
    other.sequences.add(*MODEL)
    other.sequences.start("words", "2")
    one.stage_seconds.observe(0.2, *MODEL, "total")
    other.stage_seconds.observe(0.3, *MODEL, "total")
    one.queue_depth.set(7)
    one.queue_depth.set(2)
    other.queue_depth.add(by=3)
    other.queue_depth.add(by=-1)
    snapshots = [one.snapshot(), other.snapshot(), {}]
    both = merged(msgspec.msgpack.decode(msgspec.msgpack.encode(snapshots), type=list[Snapshot]))
    assert value(both, "seqserve_sequences_total", version="1") == 4.5
    assert value(both, "seqserve_sequences_total", version="2") == 0.0
    assert value(both, f"{STAGE}_count") == 2 and value(both, f"{STAGE}_sum") == pytest.approx(0.5)
    assert value(both, "seqserve_queue_depth") == 4
    other.sequences.add(*MODEL)
    assert snapshots == [one.snapshot(), snapshots[1], {}] and snapshots[1] != other.snapshot(), "a snapshot stays as it is"
    assert merged([snapshots[0]]) == snapshots[0] and samples(merged([])) == []


def test_failure_counters_start_at_0() -> None:
    metrics = Metrics()
    metrics.start([MODEL, ("sensors", "3")])
    shown = metrics.snapshot()
    assert {one.name for one in samples(shown)} == {
        f"seqserve_{name}_total"
        for name in (
            *("requests", "denied", "refused", "failed", "cancelled", "rerun", "process_restarts"),
            *("sessions_ended", "session_moves", "requests_accepted", "model_changes"),
            *("connections_closed", "engine_errors", "traced_requests", "spans"),
            *("session_saves", "session_takes", "sessions_not_saved"),
        )
    }
    assert {one.value for one in samples(shown)} == {0.0}
    for outcome in ("ok", *FAULTS):
        assert value(shown, "seqserve_requests_total", model="sensors", version="3", outcome=outcome) == 0
    assert value(shown, "seqserve_process_restarts_total", process="engine", reason="hung") == 0
    assert value(shown, "seqserve_refused_total", reason="overloaded") == 0
    assert value(shown, "seqserve_cancelled_total", **{"while": "running"}) == 0


def test_server_shows_its_counters_from_the_start(server: Server) -> None:
    shown = [sample for family in text_string_to_metric_families(server.scrape()) for sample in family.samples]
    for outcome in ("ok", *FAULTS):
        assert the_one(shown, "seqserve_requests_total", model="words", version="2", outcome=outcome) >= 0
    assert the_one(shown, "seqserve_failed_total", model="sensors", version="1") == 0
    assert the_one(shown, "seqserve_max_batch_sequences") == 64


def test_server_faults_are_the_5xx_outcomes_and_cut_off() -> None:
    faults = {kind.code for kind, status in STATUS.items() if status.http >= 500 and kind not in (NoRoom, Unsupported)}
    assert set(FAULTS) == faults | {"cut_off"}
    assert {"invalid_input", "unknown_model", "too_large", "client_gone"}.isdisjoint(FAULTS)


def test_collections_are_observed_from_the_first_on() -> None:
    metrics = Metrics()
    metrics.observe_collections("engine")
    try:
        [(labels, [*_, total])] = metrics.snapshot()["seqserve_gc_seconds"]
        assert (labels, total) == (("engine",), 0.0)
        gc.collect()
        [(_, [*counts, total])] = metrics.snapshot()["seqserve_gc_seconds"]
        assert sum(counts) >= 1 and total > 0
    finally:
        gc.callbacks.pop()


@pytest.mark.parametrize("labels", [(), ("words",), ("words", "1", "more")], ids=str)
def test_series_requires_exactly_its_labels(labels: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="seqserve_sequences has the labels"):
        Metrics().sequences.add(*labels)


def test_exposed_buckets_are_cumulative() -> None:
    metrics = Metrics()
    observed = [0.0, 40e-6, 60e-6, 0.3, 0.3, 0.5, 9.0, 11.0, 1e6]
    for seconds in observed:
        metrics.stage_seconds.observe(seconds, *MODEL, "compute")
    found = [one for one in samples(metrics.snapshot()) if one.name == f"{STAGE}_bucket"]
    assert [float(one.labels["le"]) for one in found] == [*SECONDS, float("inf")]
    assert all(one.value <= other.value for one, other in pairwise(found))
    assert [one.value for one in found] == [sum(x <= float(one.labels["le"]) for x in observed) for one in found]
    assert found[-1].value == value(metrics.snapshot(), f"{STAGE}_count") == len(observed)
    assert value(metrics.snapshot(), f"{STAGE}_sum") == pytest.approx(sum(observed))


def test_gauge_that_is_alike_is_not_summed() -> None:
    engines = [Metrics(), Metrics()]
    for seconds, metrics in enumerate(engines, start=1):
        metrics.max_batch_sequences.set(64)
        metrics.backend.set(1, *MODEL, "lstm", "framework")
        metrics.graphs.set(12, *MODEL)
        metrics.last_answer.set(1e9 + seconds, *MODEL)
        metrics.memory_limit_used.set(seconds / 4)
        metrics.queue_depth.set(3)
        metrics.backlog_seconds.set(seconds, str(seconds))
    both = merged([*(metrics.snapshot() for metrics in engines), Metrics().snapshot()])
    assert value(both, "seqserve_max_batch_sequences") == 64
    assert value(both, "seqserve_kernel_backend_info") == 1
    assert value(both, "seqserve_graphs") == 12
    assert value(both, "seqserve_last_answer_time_seconds") == 1e9 + 2
    assert value(both, "seqserve_memory_limit_used_ratio") == 0.5
    assert value(both, "seqserve_queue_depth") == 6
    assert [value(both, "seqserve_backlog_seconds", engine=place) for place in ("1", "2")] == [1, 2]


def test_every_series_is_exposed_under_its_name_help_and_type() -> None:
    metrics = busy()
    families = {family.name: family for family in text_string_to_metric_families(render(metrics.snapshot()).decode())}
    assert set(families) == {one.name for one in metrics.series()}
    assert len(families) == len([*metrics.series()]) and all(name.startswith("seqserve_") for name in families)
    for one in metrics.series():
        assert families[one.name].documentation == one.help
        assert families[one.name].type == type(one).__name__.lower()
        assert all(sample.labels.keys() - {"le"} == set(one.labels) for sample in families[one.name].samples)


@pytest.mark.parametrize("odd", ['quoted "name"', "back\\slash", "two\nlines", "é 🙂", ""])
def test_unusual_label_values_survive_exposition(odd: str) -> None:
    metrics = Metrics()
    metrics.sequences.add(odd, "1")
    assert value(metrics.snapshot(), "seqserve_sequences_total", model=odd) == 1


def test_requests_of_an_ended_process_count_as_cut_off() -> None:
    """Its gauges are dropped, and all other totals are kept."""
    left, names = remains(busy().snapshot()), {one.name for one in Metrics().series() if not isinstance(one, Gauge)}
    assert set(left) == names
    assert all(rows == busy().snapshot()[name] for name, rows in left.items() if name != busy().requests.name)
    frontend = Metrics()
    frontend.accepted.add(by=5)
    frontend.in_flight.add(by=2)
    frontend.requests.add(*MODEL, "ok", by=3)
    left = remains(frontend.snapshot())
    assert value(left, "seqserve_requests_accepted_total") == 5
    assert value(left, "seqserve_requests_total", outcome="cut_off") == 2
    assert "seqserve_requests_in_flight" not in left


def test_newest_example_of_a_bucket_is_shown_in_openmetrics_alone() -> None:
    """Two processes have examples of the same bucket, and even the same trace in it."""
    processes = [Metrics(), Metrics()]
    labels = "words", "1", "total"
    for number, metrics in enumerate(processes):
        for value in (0.0003, 0.003):
            metrics.stage_seconds.observe(value, *labels)
        metrics.stage_seconds.note_trace("ab" * 16, [(labels, 0.0003)])
        metrics.stage_seconds.note_trace(f"{number:032x}", [(labels, 0.003)])
    snapshot = merged([metrics.snapshot() for metrics in processes])
    text = render(snapshot, openmetrics=True).decode()
    families = {family.name: family for family in text_fd_to_metric_families(StringIO(text))}  # type: ignore[no-untyped-call]
    buckets = {sample.labels["le"]: sample for sample in families["seqserve_stage_seconds"].samples if "le" in sample.labels}
    exemplars = {bound: sample.exemplar for bound, sample in buckets.items() if sample.exemplar is not None}
    assert {bound: (exemplar.labels["trace_id"], exemplar.value) for bound, exemplar in exemplars.items()} == {
        "0.0005": ("ab" * 16, 0.0003),
        "0.005": (f"{1:032x}", 0.003),
    }
    assert b"trace_id" not in render(snapshot)


def test_examples_go_with_their_version_and_their_process() -> None:
    metrics = Metrics()
    for model in ("words", "sensors"):
        metrics.stage_seconds.observe(0.1, model, "1", "total")
        metrics.stage_seconds.note_trace("ab" * 16, [((model, "1", "total"), 0.1)])
    name = metrics.stage_seconds.name + EXAMPLES
    assert [labels[0] for labels, _ in without(metrics.snapshot(), "words", "1")[name]] == ["sensors"]
    assert name not in remains(metrics.snapshot())
    metrics.forget("words", "1")
    assert [labels[0] for labels, _ in metrics.snapshot()[name]] == ["sensors"]


@pytest.mark.parametrize(
    "accept, expected",
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5", True),
        ("text/plain;q=0.5, Application/OpenMetrics-Text; version=1.0.0", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text2", False),
    ],
)
def test_format_is_chosen_by_accept(accept: str, expected: bool) -> None:
    assert accepts_openmetrics(accept) is expected
