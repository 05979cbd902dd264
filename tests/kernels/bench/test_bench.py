"""The bench checks answers before it times them: a smoke test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.bench import __main__ as command
from kernels.bench import report
from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline, TimedCall
from kernels.bench.measure import Bench, Findings
from kernels.bench.workload import EMBEDDED, FORMS, NEXT_STEPS, Workload
from kernels.bench.workloads import FAMILIES
from tests.kernels.families import cpu_backends

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restore_torch_settings() -> Iterator[None]:
    """Restore torch's settings, which the bench changes for the whole process."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def tiny(family: str, kind: str = "layer", lengths: str = "questions", rows: int = 3, form: str | None = None) -> Workload:
    """Return a workload whose hidden size is a multiple of three filter widths."""
    usual = FORMS[family][-1] if family in FORMS else {"dense-conv": "width 5", "text-cnn-ids": EMBEDDED}.get(kind, "")
    return Workload(family, rows, 7, 6, 6, lengths=lengths, kind=kind, form=usual if form is None else form)


def measured(workload: Workload, *baselines: Baseline) -> Findings:
    return Bench(CPU, baselines, budget_s=0.0, progress=lambda _: None).measured([workload])


@pytest.mark.parametrize("wrong_by", [0, 1])
def test_command_writes_right_measurements_and_returns_1_for_wrong_ones(
    wrong_by: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = Baseline("twin", lambda case: TimedCall(lambda: case.encoder("framework")() + wrong_by))
    kinds = {"conv": "dense-conv"}
    monkeypatch.setattr(command, "workloads", lambda family, *_: [tiny(family, kinds.get(family, "layer"), "equal")])
    monkeypatch.setattr(command, "BASELINES", dict.fromkeys(FAMILIES, (twin,)))
    assert command.main(["all", "--quick", "--out", str(tmp_path)]) == wrong_by
    assert ("WRONG: twin on lstm" in capsys.readouterr().out) == bool(wrong_by)
    short = report.slug(report.device_name(CPU))
    for family in FAMILIES:
        lines = (tmp_path / f"{family}-{short}.jsonl").read_text().splitlines()
        assert [json.loads(line)["backend"] for line in lines] == [*cpu_backends(family), *(["twin"] if not wrong_by else [])]


@pytest.mark.parametrize("family", ["lstm", "gru"])
def test_next_steps_start_from_the_states_of_their_slots(family: str) -> None:
    """The expected answer starts from these states too, so a contender that ignores a state is wrong."""
    from_zeros = Baseline("from zeros", lambda case: TimedCall(replace(case, state=None).encoder("framework")), states=True)
    findings = measured(tiny(family, NEXT_STEPS, "equal"), *BASELINES[family], from_zeros)
    assert [one.backend for one in findings.measurements] == [*cpu_backends(family), "torch padded"]
    assert [line.split(" on ")[0] for line in findings.wrong] == ["from zeros"]
