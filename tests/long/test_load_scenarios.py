"""The scenarios of the load test on new servers, each with little load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest import bench
from loadtest.__main__ import main
from loadtest.scenarios.fairness import ALONE, BESIDE, UNFAIR
from loadtest.servers import ROOT
from service import cli
from service.access.keys import create
from service.access.scopes import Scope
from tests import traces
from tests.certificates import Authority
from tests.serving import serving


@pytest.fixture(autouse=True)
def _own_cores() -> Iterator[None]:
    """A scenario may limit its process to some cores."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def records(folder: Path) -> list[dict[str, Any]]:
    [path] = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_fairness_measures_every_case(tmp_path: Path) -> None:
    options = ["--units", "16", "--steps", "8", "--seconds", "2", "--rounds", "1", "--share", "0.01", "--noise", "2"]
    assert main(["fairness", *options, "--out", str(tmp_path)]) in (0, 1)  # a busy machine may not answer all requests in time
    assert [record["case"] for record in records(tmp_path)] == [ALONE, BESIDE, UNFAIR]


def test_tree_is_compared_with_itself(tmp_path: Path) -> None:
    names = ["text, 1 caller", "chunk, 4 in flight", "WebSocket, 4 in flight", "streams in real time"]
    command = ["compare", str(ROOT), str(ROOT), "--pairs", "1", "--floor", "0", "--cell-floor", "0", "--cells", *names]
    assert main([*command, "--logs", str(tmp_path), "--out", str(tmp_path), "--seconds", "2"]) == 0
    [path] = tmp_path.glob("compare-*.json")
    [record] = json.loads(path.read_text()).values()
    values = [values for cell in record["cells"].values() for values in cell.values()]
    assert list(record["cells"]) == names
    assert all(each["old"] > 0 < each["new"] and np.isfinite(each["ratio"]) for each in values)


def test_locust_sends_the_key_over_tls(models_folder: Path, tmp_path: Path) -> None:
    keys, key, authority = tmp_path / "keys.toml", tmp_path / "key", Authority(tmp_path)
    key.write_text(create(keys, "measuring", [Scope.INFER, Scope.SESSION, Scope.METRICS], "measuring") + "\n")
    certificate, private = authority.sign("service")
    flags = ("--keys", str(keys), "--tls-cert", str(certificate), "--tls-key", str(private))
    with serving(models_folder, tmp_path, *flags) as server:
        line = ["locust", "--url", server.address, "--ca", str(authority.certificate), "--users", "3", "--seconds", "3"]
        assert main([*line, "--key-file", str(key), "--out", str(tmp_path / "out")]) == 0
    written = [file.read_text(errors="ignore") for file in (tmp_path / "out").iterdir() if file.is_file()]
    assert key.read_text().strip() not in "".join(written)


def test_bench_writes_a_trace_of_the_service(models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.1)
    with serving(models_folder, tmp_path, "--debug") as server:
        line = ["bench", "--url", server.address, "--models", str(models_folder), "--model", "words", "--seconds", "1"]
        assert cli.main([*line, "--trace", str(tmp_path / "trace.json"), "--callers", "1,4"]) == 0
    batches = [event for event in traces.tracks(json.loads((tmp_path / "trace.json").read_text()))["batches"] if event.args]
    assert {event.args["model"] for event in batches} == {"words"} and 1 < len(batches) <= 100
