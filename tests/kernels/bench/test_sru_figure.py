"""The figure is drawn from the records of a run."""

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


def test_every_bar_has_its_time(records: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "sru.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    assert main([str(path)]) == 0
    drawn = (tmp_path / "sru.svg").read_text()
    assert drawn.count(">721<") == drawn.count(">55<") == drawn.count(">44<") == drawn.count(">22<") == drawn.count(">11<") == 4
    assert ">66<" not in drawn and ">5<" not in drawn and ">6<" not in drawn
    assert "Abacus, 2026-01-02" in drawn and all(f">{label}<" in drawn for label, *_ in BARS)
