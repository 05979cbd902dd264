"""The comparison of all families for the recipes with streams, and their tables in the README."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def module(name: str) -> Any:
    return importlib.import_module(name)


def test_row_of_a_family_has_its_latest_figures() -> None:
    compare = module("compare_streams")
    common = {"encoder": "sru", "quick": False, "processor": "P", "date": "2026-01-02"}
    training = {**common, "kind": "training", "training_seconds": 12.4, "bytes": 31335, "threshold": 0.9}
    served = {**common, "kind": "served", "keywords": 50, "misses": 2, "false_alarms_an_hour": 0.25, "babble_hours": 10.0}
    served |= {"near_false_alarms": 7, "keyword_hours": 1.0}
    live = {
        "audio_ms_p50": 41.6,
        "audio_ms_p99": 99.0,
        "chunk_ms_p50": 3.5,
        "chunk_ms_p99": 9.25,
        "chunks": 2500,
        "late_chunks": 3,
        "streams": 100,
        "streams_behind_at_end": 1,
        "service_core_percent": 71.5,
    }
    loads = [
        {**common, "kind": "speed", "device": "cpu", "callers": 1, "p50_ms": 0.31, "texts_per_second": 3000.0},
        {**common, "kind": "speed", "device": "cpu", "callers": 64, "p50_ms": 3.1, "texts_per_second": 21000.0},
    ]
    old, trial = {**served, "misses": 40}, {**training, "quick": True, "encoder": "trial"}
    lines = compare.lines(compare.RECIPES["keyword"], [training, old, {**served, **live}, *loads, trial])
    assert (
        "| sru | 12 | 31,335 | – | 0.9 | 2 of 50 | 0.2 in 10 h | 7 in 1 h | 42 | 99 | – | – | 3.5 | 9.25 | 3 of 2,500 | 1 of 100 | 71.5 "
        "| 0.31 | 21,000 | – | – |" in lines
    )
    assert len(lines) == 5 and "P, from 2026-01-02" in lines[-1]
    assert "| – |" in compare.lines(compare.RECIPES["keyword"], [training, served])[2], "without streams in real time"
    assert "| sru | 12 | 31,335 | – | 0.9 | – | – |" in compare.lines(compare.RECIPES["keyword"], [training])[2], "only trained"


@pytest.mark.slow
def test_family_is_trained_once_and_evaluated_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare, records, pages = module("compare_streams"), module("training.records"), module("training.pages")
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text("<!-- forecast -->\nold\n<!-- end of forecast -->\n")
    line = ["forecast", "--encoders", "gru", "--quick", "--evaluate=--streams 2 --steps 150", "--seconds", "0.2"]
    line += ["--models", str(tmp_path / "models"), "--results", str(results), "--page", str(page)]
    assert compare.main(line) == 0 and compare.main(line) == 0
    measured = records.read(results)
    assert [record["kind"] for record in measured] == ["training", *(["served", "speed", "speed"] * 2)]
    assert measured[1]["loss"] == measured[4]["loss"] and measured[1]["encoder"] == "gru"
    assert pages.drawn(page, "forecast") == [pages.EMPTY], "quick figures stay out of the table"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "page.md", "results.jsonl"]


@pytest.mark.parametrize("recipe", ["forecast", "keyword"])
def test_readme_has_the_table_of_the_results_file(recipe: str) -> None:
    compare, pages, records = module("compare_streams"), module("training.pages"), module("training.records")
    lines = compare.lines(compare.RECIPES[recipe], records.read(ROOT / "examples" / f"results-{recipe}.jsonl"))
    assert pages.drawn(ROOT / "examples" / "README.md", recipe) == lines
