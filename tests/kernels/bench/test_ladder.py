"""Every rung that runs on a CPU agrees with the reference, and the table compares with the first rung."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernels.bench import __main__ as command
from kernels.bench import timing
from kernels.bench.ladder import climb as climbing
from kernels.bench.ladder import command as ladder
from kernels.bench.ladder import report
from kernels.bench.ladder.climb import Climb, climb, workload_for
from kernels.bench.ladder.rungs import RUNGS, Rung
from kernels.bench.timing import Spread
from kernels.bench.workload import ENCODER, Workload
from tests.kernels.bench.conftest import CPU

STACK = Workload("lstm", 3, 12, 5, 6, kind=ENCODER, depth=3)
"""The last group of steps is shorter than the others."""
ON_CPU = [1, 2, 5, 6, 8, 10]
"""Rungs without a stream, a kernel or a graph."""


def climbed(*rungs: Rung, workload: Workload = STACK, device: torch.device = CPU) -> Climb:
    return climb(workload, rungs, device, 0.0, lambda _: None)


def numbers(result: Climb) -> list[int]:
    return [step.rung.number for step in result.steps]


def test_rungs_of_a_cpu_agree_and_the_others_are_named() -> None:
    result = climbed(*RUNGS)
    assert not result.wrong and numbers(result) == ON_CPU
    assert all(step.error < 1e-5 and step.called.repetitions >= timing.AT_LEAST for step in result.steps)
    assert result.skipped == [
        "3 two streams is skipped: a CPU has no streams",
        "4 fused pointwise operations is skipped: its kernel needs an NVIDIA GPU",
        "7 layers side by side is skipped: a CPU has no streams",
        "9 torch.nn.LSTM, in a graph is skipped: a CPU has no CUDA graphs",
    ]


def timed(*steps: tuple[int, float, float | None], peak: float | None = 1e6) -> Climb:
    """Return a climb with the number of each rung, and its times as called and in a graph."""

    def spread(us: float) -> Spread:
        return Spread(us, us, us, 20)

    found = [
        climbing.Step(RUNGS[number - 1], spread(called), None if graph is None else spread(graph), 1e-7)
        for number, called, graph in steps
    ]
    return Climb(workload_for("cuda", "float16", quick=False), peak, found)


def test_table_compares_with_the_first_rung_and_the_published_ladder() -> None:
    # Four layers multiply 53,687,091,200 times: 107,374 GFLOP/s in a millisecond.
    text = report.table(timed((1, 8000.0, 4000.0), (2, 4000.0, 1000.0), (10, 1000.0, 1000.0)))
    title, _, heading, first, second, ours = text.splitlines()
    assert title == "lstm encoder 64 x 100, 512 -> 512, float16, 4 levels; peak 2 TFLOP/s"
    assert heading.split()[-4:] == ["graph", "speed-up", "published,", "M40"]
    assert first.split()[-9:] == ["(8000-8000)", "13422", "6.7e+02", "%", "1", "4000", "(4000-4000)", "1", "1"]
    assert second.split()[-7:] == ["1.3e+03", "%", "2", "1000", "(1000-1000)", "4", "2.1"]
    assert ours.split()[-5:] == ["8", "1000", "(1000-1000)", "4", "-"]


@pytest.fixture
def tiny_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measured_peaks", lambda *_: None)
    monkeypatch.setattr(ladder, "workload_for", lambda *_: STACK)
    monkeypatch.setattr(ladder, "product_rate", lambda *_: 1000.0)


def test_ladder_writes_records_and_text(tiny_ladder: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["ladder", "--quick", "--out", str(tmp_path)]) == 0
    records, text = sorted(tmp_path.iterdir())
    assert records.name.startswith("ladder-") and (records.suffix, text.suffix) == (".jsonl", ".txt")
    assert [json.loads(line)["rung"] for line in records.read_text().splitlines()] == ON_CPU
    printed = capsys.readouterr()
    assert text.read_text() in printed.out
    assert "3 two streams is skipped: a CPU has no streams" in text.read_text()
    assert f"1 products and operations by gate, {STACK}" in printed.err
