"""The plain handler is a fair baseline: with the same weights, it returns the same answers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from loadtest.traffic import Traffic, words
from service import local
from service.settings import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
QUESTIONS = ["Who wrote Hamlet ?", "What", "How far is it from Denver to Aspen ?", "Where is Ayers Rock ?"]
ROUNDING = 5e-3
"""The service's tables are float16."""


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("loadtest.plain_fastapi")


@pytest.mark.parametrize("name", ["question-type-cnn", "question-type-lstm", "question-type-sru"])
def test_plain_handler_returns_the_answers_of_the_service(plain: Any, name: str) -> None:
    folder = ROOT / "models" / name / "1"
    model = {"name": name, "version": "1", "min_steps": 1, "input": {"kind": "text", "max_steps": 512}}
    texts = QUESTIONS + Traffic(model, words((folder / "tokenizer.json").read_text())).body(20)["inputs"]
    client = TestClient(plain.build(folder))
    batch = outputs(client, name, texts)
    single = [outputs(client, name, [text])[0] for text in texts]
    for ours, *plain_outputs in zip(local.infer(Settings(device="cpu"), name, texts), batch, single, strict=True):
        for output in plain_outputs:
            assert output["scores"] == pytest.approx(ours["scores"], abs=ROUNDING)
            assert output["score"] == max(output["scores"].values()) == output["scores"][output["label"]]


def outputs(client: TestClient, name: str, texts: list[str]) -> list[dict[str, Any]]:
    response = client.post("/infer", json={"model": name, "inputs": texts})
    assert response.status_code == 200
    body = response.json()
    assert (body["model"], body["version"]) == (name, "1")
    return list(body["outputs"])


def test_readyz_answers(plain: Any) -> None:
    client = TestClient(plain.build(ROOT / "models" / "question-type-cnn" / "1"))
    assert client.get("/readyz").status_code == 200


def test_missing_port_is_refused(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["plain_fastapi", "somewhere"])
    with pytest.raises(SystemExit):
        plain.main()
