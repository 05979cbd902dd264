"""The devices scenario measures the first device alone and all devices together, on the CPU with a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.scenarios import devices


def test_one_device_and_all_devices_answer_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "INPUTS", 2)
    sizes = ["--hidden", "4", "--steps", "3", "--frontends", "1", "--log", str(tmp_path / "server.log")]
    options = ["--devices", "cpu,cpu", "--seconds", "0.1", "--rounds", "1", "--out", str(tmp_path)]
    assert main(["devices", *sizes, *options]) == 0
    [path] = tmp_path.glob("devices-*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["round"], record["devices"]) for record in records] == [(0, ["cpu"]), (0, ["cpu", "cpu"])]
    for record in records:
        assert (record["hidden"], record["steps"], record["frontends"], record["failed"]) == (4, 3, 1, 0)
        assert record["sequences_per_second"] == pytest.approx(2 * record["answers/s"], rel=1e-3)
        assert record["answers"] > 0 < record["p50_ms"] <= record["p99_ms"]
        assert {"machine", "date", "versions"} <= record.keys()
    *_, head, alone, both, _, written = capsys.readouterr().out.splitlines()
    assert head.split() == ["devices", "sequences/s", "times"]
    assert alone.endswith("1 (1 to 1)") and both.split()[0] == "cpu,cpu"
    assert written == f"written to {path}"
