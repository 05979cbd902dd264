"""The plain handler is a fair opponent: with the same weights it gives the same answers."""

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
def test_the_plain_handler_answers_as_the_service_does(plain: Any, name: str) -> None:
    folder = ROOT / "models" / name / "1"
    model = {"name": name, "version": "1", "min_steps": 1, "input": {"kind": "text", "max_steps": 512}}
    texts = QUESTIONS + Traffic(model, words((folder / "tokenizer.json").read_text())).body(20)["inputs"]
    client = TestClient(plain.build(folder))
    batch = asked(client, name, texts)
    lone = [asked(client, name, [text])[0] for text in texts]
    for ours, *theirs in zip(local.infer(Settings(device="cpu"), name, texts), batch, lone, strict=True):
        for one in theirs:
            assert one["scores"] == pytest.approx(ours["scores"], abs=ROUNDING)
            assert one["score"] == max(one["scores"].values()) == one["scores"][one["label"]]


def asked(client: TestClient, name: str, texts: list[str]) -> list[dict[str, Any]]:
    answer = client.post("/infer", json={"model": name, "inputs": texts})
    assert answer.status_code == 200
    said = answer.json()
    assert (said["model"], said["version"]) == (name, "1")
    outputs: list[dict[str, Any]] = said["outputs"]
    return outputs


def test_it_says_when_it_is_ready(plain: Any) -> None:
    client = TestClient(plain.build(ROOT / "models" / "question-type-cnn" / "1"))
    assert client.get("/readyz").status_code == 200


def test_without_a_folder_or_a_port_it_does_not_start(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["plain_fastapi", "somewhere"])
    with pytest.raises(SystemExit):
        plain.main()
