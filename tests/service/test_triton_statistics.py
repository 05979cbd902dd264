"""Statistics with Triton's names and units, computed from the service's own metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from service.exposition import render
from service.metrics import Metrics
from service.triton_statistics import families, statistics


def example_metrics() -> Metrics:
    """Return the metrics after two answered requests, with three sequences and one sequence in one batch, and two failed requests."""
    metrics = Metrics()
    words = ("words", "1")
    for outcome, count in (("ok", 2), ("overloaded", 1), ("invalid_input", 1)):
        metrics.requests.add(*words, outcome, by=count)
    metrics.sequences.add(*words, by=4)
    metrics.batches.add(*words, "graph")
    metrics.stage_seconds.observe(0.25, *words, "queue")
    metrics.stage_seconds.observe(0.5, *words, "total")
    metrics.stage_seconds.observe_often(0.001, 4, *words, "compute")
    metrics.failed_seconds.add(*words, by=0.1)
    metrics.last_answer.set(1_000_000_000.25, *words)
    metrics.sequences_waiting.set(3, *words)
    metrics.requests.add("unloaded", "unloaded", "ok", by=9)
    return metrics


def test_time_series_have_the_names_and_units_of_triton() -> None:
    snapshot = example_metrics().snapshot()
    samples = [
        sample
        for family in text_string_to_metric_families(render(snapshot, families(snapshot)).decode())
        for sample in family.samples
        if sample.name.startswith("nv_inference_") and (sample.labels["model"], sample.labels["version"]) == ("words", "1")
    ]
    assert {(sample.name.removeprefix("nv_inference_"), sample.labels.get("reason")): sample.value for sample in samples} == {
        ("request_success", None): 2,
        ("count", None): 4,
        ("exec_count", None): 1,
        ("request_duration_us", None): 500_000,
        ("queue_duration_us", None): 250_000,
        ("compute_infer_duration_us", None): 4_000,
        ("request_failure", "REJECTED"): 1,
        ("request_failure", "OTHER"): 1,
        ("pending_request_count", None): 3,
    }
    assert b'nv_inference_count{model="unloaded"' not in render(snapshot, families(snapshot))


def test_model_statistics_equal_the_time_series() -> None:
    [model] = statistics(example_metrics().snapshot(), [("words", "1")])
    times = model.pop("inference_stats")
    counts = {"inference_count": 4, "execution_count": 1, "batch_stats": []}
    assert model == {"name": "words", "version": "1", "last_inference": 1_000_000_000_250, **counts}
    assert times["success"] == {"count": 2, "ns": 400_000_000}
    assert times["fail"] == {"count": 2, "ns": 100_000_000}
    assert times["queue"] == {"count": 4, "ns": 250_000_000}
    assert times["compute_infer"] == {"count": 4, "ns": 4_000_000}


def test_statistics_of_an_unused_model_are_zero() -> None:
    [model] = statistics(Metrics().snapshot(), [("words", "1")])
    assert (model["inference_count"], model["last_inference"]) == (0, 0)
    assert model["inference_stats"]["success"] == {"count": 0, "ns": 0}
