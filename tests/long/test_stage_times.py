"""The stages of requests follow each other without a gap: under load, their means add up to the mean of `total`."""

from __future__ import annotations

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from loadtest.generator.job import Job
from loadtest.generator.loops import run
from loadtest.target import Target
from tests.serving import Server

STAGES = ("parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode")
TOLERANCE = 0.15
"""A process that loses its processor between two stages leaves a gap. On an idle machine the difference is below 0.02."""


def stage_sums(server: Server) -> dict[tuple[str, str], float]:
    """Return the seconds and the count of each stage."""
    [family] = (family for family in text_string_to_metric_families(server.scrape()) if family.name == "seqserve_stage_seconds")
    return {
        (sample.labels["stage"], sample.name.rpartition("_")[2]): sample.value
        for sample in family.samples
        if sample.labels["model"] == "words" and sample.labels["version"] == "2" and not sample.name.endswith("_bucket")
    }


def test_means_of_the_stages_add_up_to_the_total(server: Server) -> None:
    target = Target.of(server.address, "/infer")
    requests = [target.request(b'{"model": "words", "version": 2, "inputs": ["how far is the sea ?"]}')]
    assert server.infer("words", ["who"], version=2).status_code == 200
    before = stage_sums(server)
    job = Job("http", target.host, target.port, "", requests, "answer", [[]], callers=8, seconds=1.0)
    result = uvloop.run(run(job))
    assert not result.failures
    grown = {key: value - before[key] for key, value in stage_sums(server).items()}
    counts = {stage: grown[stage, "count"] for stage in (*STAGES, "total")}
    assert set(counts.values()) == {counts["total"]} and counts["total"] >= result.answers > 0
    total = grown["total", "sum"]
    assert abs(sum(grown[stage, "sum"] for stage in STAGES) - total) <= TOLERANCE * total
