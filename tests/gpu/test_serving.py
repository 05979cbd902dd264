"""The service with its engine on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Server, serving

ROOT = Path(__file__).resolve().parent.parent.parent
EMBEDDED = [
    "How far is it from Denver to Aspen ?",
    "Who wrote Hamlet ?",
    "What is an atom ?",
    "Where is Ayers Rock ?",
    "What does NASA mean ?",
]
QUESTIONS = ["how far is the sea ?", "who", "who was the first ?", "is the sea far"]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Serve the embedded models on a GPU and on the CPU."""
    scratch = tmp_path_factory.mktemp("log")
    with (
        serving(ROOT / "models", scratch, "--device", "cuda:0") as on_gpu,
        serving(ROOT / "models", scratch, "--device", "cpu") as on_cpu,
    ):
        yield on_gpu, on_cpu


@pytest.mark.parametrize(
    "model, backend",
    [
        ("question-type-cnn", "fused"),
        ("question-type-lstm", "persistent"),
        ("question-type-sru", "fused"),
        ("sensor-forecast", "persistent"),
    ],
)
def test_embedded_models_use_fused_kernels_on_a_gpu(model: str, backend: str, embedded: tuple[Server, Server]) -> None:
    on_gpu, on_cpu = (
        {served["name"]: served for served in server.client.get("/models").json()["models"]} for server in embedded
    )
    assert backend in " ".join(on_gpu[model]["backends"])
    assert backend not in " ".join(on_cpu[model]["backends"])


@pytest.mark.parametrize("model", ["question-type-cnn", "question-type-lstm", "question-type-sru"])
def test_embedded_models_have_the_same_labels_on_a_gpu(model: str, embedded: tuple[Server, Server]) -> None:
    on_gpu, on_cpu = (server.infer(model, EMBEDDED).json()["outputs"] for server in embedded)
    assert [output["label"] for output in on_gpu] == [output["label"] for output in on_cpu]
    for output, expected in zip(on_gpu, on_cpu, strict=True):
        assert output["scores"] == pytest.approx(expected["scores"], abs=5e-3), "float16 products"


def test_gpu_matches_the_cpu(server: Server, models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--device", "cuda:0") as on_gpu:
        outputs, expected_outputs = (each.infer("words", QUESTIONS).json()["outputs"] for each in (on_gpu, server))
        assert on_gpu.client.get("/models").json()["models"][0]["device"] == "cuda:0"
    for output, expected in zip(outputs, expected_outputs, strict=True):
        assert output["label"] == expected["label"]
        assert output["scores"] == pytest.approx(expected["scores"], abs=1e-4)


def test_sessions_continue_from_slots_and_from_the_host(tmp_path: Path) -> None:
    chance = random.Random(0)
    streams = [[[round(chance.gauss(0, 1), 3) for _ in range(3)] for _ in range(60)] for _ in range(12)]
    with serving(ROOT / "models", tmp_path, "--device", "cuda:0", state_slots="4") as on_gpu:
        whole = [on_gpu.infer("sensor-forecast", [stream]).json()["outputs"][0]["value"] for stream in streams]
        for begin, end in ((0, 1), (1, 20), (20, 60)):
            answers = [
                on_gpu.infer("sensor-forecast", [stream[begin:end]], session=f"s{at}").json()
                for at, stream in enumerate(streams)
            ]
        assert [answer["session"]["steps"] for answer in answers] == [60] * len(streams)
        for answer, expected in zip(answers, whole, strict=True):
            assert answer["outputs"][0]["value"] == pytest.approx(expected, abs=2e-2), "float16"
        assert on_gpu.metric("seqserve_session_moves_total", to="host") > 0
        assert on_gpu.metric("seqserve_batches_total", model="sensor-forecast", by="launches") == 0
