"""The figure is drawn from the records of a run, and missing records are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.bench.sru_figure import BARS, GROUPS, OURS, main

MEDIANS = {"torch LSTM": 721.0, "conv1d width 3": 66.0, "conv1d width 3, channels last": 55.0, "conv1d width 2": 44.0}


def record(backend: str, form: str, steps: int, hidden: int, median_us: float) -> dict[str, Any]:
    return {
        "family": "sru",
        "workload": "every-step",
        "form": form,
        "backend": backend,
        "rows": 32,
        "steps": steps,
        "hidden": hidden,
        "timing": "kernel",
        "median_us": median_us,
        "device": "Abacus",
        "date": "2026-01-02",
    }


@pytest.fixture
def records() -> list[dict[str, Any]]:
    others = [record(baseline, "v2", *size, median_us) for size in GROUPS for baseline, median_us in MEDIANS.items()]
    ours = [record(OURS[0], form, *size, median_us) for size in GROUPS for form, median_us in (("v1", 11.0), ("v2", 22.0))]
    return [
        *others,
        *ours,
        {**ours[0], "workload": "layer", "median_us": 5.0},
        {**ours[0], "timing": "eager", "median_us": 6.0},
    ]


def written(records: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return path


def test_every_bar_has_its_time(records: list[dict[str, Any]], tmp_path: Path) -> None:
    path = written(records, tmp_path / "sru.jsonl")
    assert main([str(path)]) == 0
    drawn = (tmp_path / "sru.svg").read_text()
    assert drawn.count(">721<") == drawn.count(">55<") == drawn.count(">44<") == drawn.count(">22<") == drawn.count(">11<") == 4
    assert ">66<" not in drawn and ">5<" not in drawn and ">6<" not in drawn
    assert "Abacus, 2026-01-02" in drawn and all(f">{label}<" in drawn for label, *_ in BARS)


def test_missing_time_is_reported_and_nothing_is_drawn(
    records: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [each for each in records if each["backend"] != "torch LSTM" or each["steps"] != 128]
    assert main([str(written(few, tmp_path / "sru.jsonl"))]) == 1
    assert "no kernel time of torch LSTM for 32 x 128, width 256: time it with" in capsys.readouterr().err
    assert not (tmp_path / "sru.svg").exists()
