"""`python -m loadtest compare`: what is judged, what is an error, and that pairs alternate."""

from __future__ import annotations

import argparse
import json
import runpy
import signal
import sys
from array import array
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadtest import servers
from loadtest.__main__ import main
from loadtest.discovery import CannotMeasure
from loadtest.generator.job import Job, Result
from loadtest.requests import ENGINE, FRONTENDS, Clients, Requests
from loadtest.scenarios import compare
from loadtest.scenarios.compare import P50, P99, QUANTITIES
from loadtest.scenarios.rounds import RATE
from loadtest.servers import ROOT

BUSY, OPEN = "text, 32 callers", "text, 20 a second"


def cells(**changed: float) -> dict[str, dict[str, dict[str, float]]]:
    """Return two cells in which NEW is equal to OLD, apart from the ratios `busy_QUANTITY` and `open_QUANTITY`."""
    return {
        name: {quantity: {"low": 0.1, "ratio": changed.get(f"{short}_{quantity}", 1.0), "high": 9} for quantity in QUANTITIES}
        for name, short in ((BUSY, "busy"), (OPEN, "open"))
    }


def test_more_is_better_in_every_ratio() -> None:
    """Five pairs: NEW has 1, 2, 3, 4 and 8 times as much of everything."""
    old = np.arange(10, 60, 10)
    values = np.stack((old, old * (3, 1, 4, 8, 2)), axis=1)[:, :, None].repeat(len(QUANTITIES), axis=2).astype(float)
    cell = compare.summary(values)
    assert cell[RATE] == {"old": 30, "new": 100, "low": 2, "ratio": 3, "high": 4}
    less = {"old": 30, "new": 100, "low": 0.25, "ratio": 0.3333, "high": 0.5}
    assert [cell[quantity] for quantity in (FRONTENDS, ENGINE, P50, P99)] == [less] * 4


@pytest.mark.parametrize(
    "changed, faults",
    [
        ({}, []),
        ({"busy_answers_per_second": 0.95}, [f"{RATE}: the geometric mean 0.950 is below 0.97"]),
        (
            {"open_engine_us": 0.8, "busy_engine_us": 1.25, "busy_frontends_us": 0.95, "open_frontends_us": 0.95},
            [f"{FRONTENDS}: the geometric mean 0.950 is below 0.97", f"{OPEN}, {ENGINE}: 0.800 is below 0.9"],
        ),
        # Latencies and the rate of an open loop are only shown.
        ({"busy_p50_ms": 0.1, "busy_p99_ms": 0.1, "open_answers_per_second": 0.1}, []),
    ],
)
def test_rates_and_processor_time_are_judged_by_cell_and_by_mean(changed: dict[str, float], faults: list[str]) -> None:
    assert compare.below(cells(**changed), 0.97, 0.9) == faults


def test_old_gets_the_packages_that_new_has_in_other_versions() -> None:
    assert compare.other_packages("numpy==2.4\ntorch==2.1\n", "torch==2.1\n# a new one\nredis==8.1\nnumpy==2.4\n") == []
    assert compare.other_packages("numpy==2.4\ntorch==2.1\nh11==1", "torch==2.2\nnumpy==2.4\n") == ["h11==1", "torch==2.1"]


@pytest.mark.parametrize("version", [ROOT / "tests", "no-commit"])
def test_version_is_a_commit_or_a_folder_with_the_project(version: object, tmp_path: Path) -> None:
    """Another status than that of a slower version. An unwritable output folder is reported at once."""
    assert main(["compare", str(version), str(ROOT), "--out", str(tmp_path)]) == 2
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(ROOT), str(ROOT), "--out", str(tmp_path / "file")])
    assert ended.value.code == 2


@pytest.mark.parametrize("flag", ["--pairs", "--seconds"])
def test_numbers_above_zero_are_required(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "old", "new", flag, "0"])
    assert f"argument {flag}: '0' is not a number above zero" in capsys.readouterr().err


def test_servers_end_with_a_terminated_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(compare, "run", lambda _: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(sys, "argv", ["loadtest", "compare", "old", "new", "--out", str(tmp_path)])
    try:
        with pytest.raises(KeyboardInterrupt):
            runpy.run_path(str(ROOT / "loadtest" / "__main__.py"), run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("result", [Result(1, 0, 9, b"", {"wrong answer": 1}, 0, []), Result(1, 0, 0, b"", {}, 0, [])])
def test_wrong_failed_or_missing_answer_is_an_error(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Requests, "measure", lambda *_, **__: (result, {}))
    server: Any = None
    options = argparse.Namespace(seconds=1.0)
    with pytest.raises(CannotMeasure, match=f"this commit, {BUSY}: .*(wrong|no) answer"):
        compare._trial(server, compare.CELLS[BUSY], Requests("http", "", [], "infer"), f"this commit, {BUSY}", 0, options)


def test_processor_time_is_that_of_an_answer_by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = {"": [1, 2, 3, 4], "service.frontend": [2, 3], "service.engine": [4]}
    server: Any = SimpleNamespace(url="http://127.0.0.1:1", pids=lambda role="": pids[role])
    used = {1: 0.1, 2: 0.2, 3: 0.2, 4: 0.4}

    def run_in_processes(jobs: list[Job]) -> Result:
        [job] = jobs
        return Result(1.0, 0, 1000, b"", {}, 0.05, [used[pid] for pid in job.pids])

    monkeypatch.setattr("loadtest.requests.run_in_processes", run_in_processes)
    _, values = Requests("http", "", [], "infer").measure(server)
    assert values == pytest.approx({"cpu_us": 900, FRONTENDS: 400, ENGINE: 400, "generators_us": 50})


def test_pairs_alternate_and_a_red_comparison_has_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[str] = []

    def measure(requests: Requests, server: Any, **load: Any) -> tuple[Result, dict[str, float]]:
        loaded.append(side := server.url)
        latencies = array("d", [0.002 if side == "old" else 0.001]).tobytes()
        return Result(1.0, 0, 100 if side == "old" else 80, latencies, {}, 0.1, []), dict.fromkeys((FRONTENDS, ENGINE), 10.0)

    def serving(*flags: str, log: Path, **where: Any) -> Any:
        return nullcontext(SimpleNamespace(url=log.stem))

    monkeypatch.setattr(servers, "running", serving)
    monkeypatch.setattr(Requests, "measure", measure)

    def requests(cell: compare.Cell, clients: Clients, seconds: float) -> Requests:
        assert clients.url == "old", "NEW must answer as OLD does"
        return Requests("http", "", [], "infer")

    monkeypatch.setattr(compare.Cell, "requests", requests)
    command = ["compare", str(ROOT), str(ROOT), "--pairs", "3", "--cells", BUSY]
    assert main([*command, "--logs", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert loaded == ["old", "new", "new", "old", "old", "new"]
    assert f"{BUSY}, {RATE}: 0.800 is below 0.9" in capsys.readouterr().out.splitlines()
    [path] = tmp_path.glob("compare-*.json")
    [record] = json.loads(path.read_text()).values()
    assert record["cells"][BUSY][P50] == {"old": 2, "new": 1, "low": 2, "ratio": 2, "high": 2}
    assert record["means"] == {RATE: 0.8, FRONTENDS: 1, ENGINE: 1} and record["below"] and record["machine"]
