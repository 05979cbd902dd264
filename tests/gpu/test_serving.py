"""The service with its engine on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import Server, serving

QUESTIONS = ["how far is the sea ?", "who", "who was the first ?", "is the sea far"]


def test_a_gpu_answers_as_the_cpu_does(server: Server, models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--device", "cuda:0") as on_gpu:
        ours, theirs = (one.infer("words", QUESTIONS).json()["outputs"] for one in (on_gpu, server))
        assert on_gpu.client.get("/models").json()["models"][0]["device"] == "cuda:0"
    for one, other in zip(ours, theirs, strict=True):
        assert one["label"] == other["label"]
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-4)
