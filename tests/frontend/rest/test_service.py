"""POST /infer to the real service: answers, statistics, and requests that wait, are late or are given up while a gated device is busy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.rest.test_infer import GOOD, QUESTION, refused
from tests.kernels.families import cpu_backends
from tests.models import LABELS, WORDS
from tests.planted import Gate, plant
from tests.raw_websocket import connection
from tests.serving import Server, eventually, serving

ROWS = [[0.1, 0.2, 0.3]] * 10
BATCH = 5
"""Sequences in a batch of a gated server."""
COUNTS = ("request_success", "count", "exec_count")
TIMES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
STAGES = {
    **dict.fromkeys(("parse", "channel", "reply", "encode", "total"), 1),
    **dict.fromkeys(("queue", "stage_in", "device_wait", "compute", "stage_out"), 2),
}
"""How often each stage of a request with two inputs is counted."""


def test_texts_and_ids_get_labels_scores_and_vectors(server: Server) -> None:
    ids = [WORDS.index(word) for word in QUESTION.split()]
    answer = server.infer("words", [QUESTION, "who", ids], **{"return": ["embedding", "sequence"]}).json()
    assert (answer["model"], answer["version"]) == ("words", "2"), "the newest version by default"
    for output, steps in zip(answer["outputs"], (6, 1, 6), strict=True):
        assert set(output["scores"]) == set(LABELS)
        assert output["score"] == max(output["scores"].values()) == output["scores"][output["label"]]
        assert sum(output["scores"].values()) == pytest.approx(1, abs=1e-6)
        assert [len(step) for step in output["sequence"]] == [10] * steps
        pooled = [max(column) for column in zip(*output["sequence"], strict=True)]
        assert pooled == output["embedding"], "the model pools by the maximum over time"
    assert answer["outputs"][0] == answer["outputs"][2] != answer["outputs"][1]
    first = server.infer("words", [QUESTION], version=1).json()
    assert first["version"] == "1" and first["outputs"][0]["scores"] != answer["outputs"][0]["scores"]


def test_each_stage_of_a_request_is_timed(server: Server) -> None:
    before = {stage: server.metric("seqserve_stage_seconds_count", model="words", stage=stage) for stage in STAGES}
    answered = server.metric("seqserve_requests_total", model="words", outcome="ok")
    assert server.infer("words", [QUESTION, "who"]).status_code == 200
    assert server.metric("seqserve_requests_total", model="words", outcome="ok") == answered + 1
    for stage, added in STAGES.items():
        assert server.metric("seqserve_stage_seconds_count", model="words", stage=stage) == before[stage] + added, stage
    assert server.metric("seqserve_ready") == 1
    assert server.metric("seqserve_kernel_backend_info", model="words", version="1", backend=cpu_backends("lstm")[0]) == 1


def test_models_are_listed_with_device_and_backends(server: Server) -> None:
    listed = server.client.get("/models").json()["models"]
    assert [(model["name"], model["version"], model["ready"], model["streams"]) for model in listed] == [
        *(("sensors", "1", True, True), ("words", "1", True, False), ("words", "2", True, False)),
    ]
    assert (listed[0]["device"], listed[0]["backends"]) == ("cpu", [f"layers.0: {cpu_backends('lstm')[0]}"])
    assert listed[1]["head"]["labels"] == list(LABELS)
    assert "layers.0: folded table" in listed[1]["backends"]


def test_server_counts_and_times_its_requests(server: Server) -> None:
    def counts() -> list[float]:
        named = [f"nv_inference_{name}" for name in COUNTS]
        return [server.metric(name, model="words", version="2") for name in (*named, "seqserve_batches_total")]

    before = counts()
    for _ in range(5):
        assert server.infer("words", [QUESTION, QUESTION]).status_code == 200
    answered, sequences, runs, batches = (after - count for after, count in zip(counts(), before, strict=True))
    assert (answered, sequences, runs) == (5, 10, batches)
    assert all(server.metric(f"nv_inference_{name}_duration_us", model="words") > 0 for name in TIMES)
    failed = server.metric("nv_inference_request_failure", model="words", reason="OTHER")
    assert server.infer("words", [1]).status_code == 400
    assert server.metric("nv_inference_request_failure", model="words", reason="OTHER") == failed + 1
    assert server.metric("nv_inference_pending_request_count", model="words") == 0
    for path, names in (("", ["sensors", "words", "words"]), ("/words", ["words"] * 2), ("/words/versions/2", ["words"])):
        found = server.client.get(f"/v2/models{path}/stats").json()["model_stats"]
        assert [model["name"] for model in found] == names
    [words] = found
    assert 0 < words["inference_stats"]["compute_infer"]["ns"] < words["inference_stats"]["success"]["ns"]
    assert words["last_inference"] > 1_600_000_000_000
    for path in ("/v2/models/nobody/stats", "/v2/models/words/versions/3/stats"):
        assert server.client.get(path).status_code == 404


# Deadlines, priorities, full queues and clients that disconnect, with a device that waits for the test.


@dataclass
class Gated:
    """A server with a gated device, its gate, and threads for requests that wait."""

    server: Server
    gate: Gate
    pool: ThreadPoolExecutor

    def start(self, model: str, inputs: list[Any], **fields: Any) -> Future[httpx.Response]:
        """Send a request, and return its future response."""
        return self.pool.submit(self.server.infer, model, inputs, deadline_ms=60_000, **fields)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the engine busy with one batch. It ends after the `with` block."""
        arrived = self.arrived
        self.gate.let(0)
        running = self.start("sensors", [ROWS])
        try:
            eventually(lambda: self.arrived == arrived + 1 and self.queue_depth == 0)
            yield
        finally:
            self.gate.open()
        assert running.result().status_code == 200

    @property
    def arrived(self) -> float:
        """How many requests to "sensors" have arrived at the engine."""
        return self.server.metric("seqserve_stage_seconds_count", model="sensors", stage="channel")

    @property
    def queue_depth(self) -> float:
        return self.server.metric("seqserve_queue_depth")


@pytest.fixture(scope="module")
def gated(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    """A server with a gated device. Its batches are whole: no sequence is cut, however slow the device seems."""
    folder = tmp_path_factory.mktemp("log")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(20) as pool:
        patch.setenv("GATE", str(folder / "gate"))
        plant("gated-device", patch)
        gate = Gate(folder / "gate")
        limits = {"max_batch_sequences": str(BATCH), "batch_budget_ms": "60000", "max_waiting": "16", "max_inputs": "16"}
        with serving(models_folder, folder, **limits) as running:
            yield Gated(running, gate, pool)


def test_expired_requests_get_504_and_are_not_computed(gated: Gated) -> None:
    computed = gated.server.metric("seqserve_sequences_total", model="words")
    with gated.busy():
        start = time.monotonic()
        answer = gated.server.infer("words", [QUESTION] * 10, deadline_ms=100)
        assert time.monotonic() - start >= 0.1
    refused(answer, 504, "deadline_exceeded", "deadline")
    assert gated.server.infer("words", [QUESTION]).status_code == 200
    assert gated.server.metric("seqserve_sequences_total", model="words") == computed + 1


def test_disconnected_client_is_cancelled_without_harm_to_its_batch(gated: Gated) -> None:
    """Batches form while the engine is busy."""
    server = gated.server
    before = server.metric("seqserve_requests_total", outcome="client_gone")
    computed = server.metric("seqserve_sequences_total", model="words")
    batches = server.metric("seqserve_batch_sequences_count", model="words")
    with gated.busy(), connection(server) as leaving:
        body = json.dumps(GOOD).encode()
        leaving.sendall(b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        mates = [gated.start("words", [QUESTION]) for _ in range(2 * BATCH)]
        eventually(lambda: gated.queue_depth == 2 * BATCH + 1)
        leaving.close()
        eventually(lambda: server.metric("seqserve_requests_total", outcome="client_gone") == before + 1)
    assert [mate.result().status_code for mate in mates] == [200] * 2 * BATCH
    assert server.metric("seqserve_sequences_total", model="words") == computed + 2 * BATCH
    assert server.metric("seqserve_batch_sequences_count", model="words") == batches + 2


def test_full_queue_gets_503_with_retry_after(gated: Gated) -> None:
    before = gated.server.metric("seqserve_refused_total", reason="overloaded")
    with gated.busy():
        requests = [gated.start("words", [QUESTION] * 8) for _ in range(5)]
        eventually(lambda: gated.server.metric("seqserve_refused_total", reason="overloaded") == before + 3)
    replies = [request.result() for request in requests]
    assert sorted(reply.status_code for reply in replies) == [200, 200, 503, 503, 503]
    rejected = next(reply for reply in replies if reply.status_code == 503)
    refused(rejected, 503, "overloaded", "16 sequences wait", "SEQSERVE_MAX_WAITING is 16")
    assert rejected.headers["retry-after"] == "1"


def test_higher_priority_runs_first(gated: Gated) -> None:
    with gated.busy():
        waiting = {priority: gated.start("sensors", [ROWS] * BATCH, priority=priority) for priority in (0, 5, -5)}
        eventually(lambda: gated.queue_depth == 3 * BATCH)
        gated.gate.let(1)
        for queued, priority in ((2, 5), (1, 0), (0, -5)):
            eventually(lambda depth=queued * BATCH: gated.queue_depth == depth)  # type: ignore[misc]
            gated.gate.let(1)
            assert waiting[priority].result().status_code == 200
