"""The evaluation example, run the way a user runs it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Server, serving

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = [
    "5 How many miles is it from London to Paris ?",
    "3 Who wrote Hamlet ?",
    "4 Where is Ayers Rock ?",
    "4 Who was Galileo ?",
]


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return runpy.run_path(str(ROOT / "examples" / "evaluate.py"))["main"]


def test_evaluate_prints_the_accuracy_of_each_model(evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trec.test.txt").write_text("\n".join(QUESTIONS) + "\n", "latin-1")
    with serving(ROOT / "models", tmp_path) as server:
        assert evaluate(["--data", str(tmp_path), "--url", server.address]) == 0
    printed = capsys.readouterr().out
    assert "correct of 4 texts" in printed
    assert "| question-type-lstm 1 | 3 | 75.0 % |" in printed, "the last question has a wrong label on purpose"


def test_evaluate_without_questions_explains_the_download(
    evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(["--data", str(tmp_path)]) == 2
    assert "trec.test.txt" in capsys.readouterr().err


def test_evaluate_without_a_service_explains_how_to_start_it(
    evaluate: Any, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trec.test.txt").write_text(QUESTIONS[0] + "\n")
    assert evaluate(["--data", str(tmp_path), "--url", "http://127.0.0.1:9"]) == 1
    assert "make serve" in capsys.readouterr().err
