"""Triton's load generator runs over every protocol for every model. A script replaces it here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.scenarios import perf_analyzer
from loadtest.scenarios.perf_analyzer import GRPC, REST, STREAM
from tests.serving import Server

SCRIPT = """
import csv, json, os, sys
words = sys.argv[1:]
flags = dict(zip(words, words[1:]))
with open(os.path.join(os.path.dirname(flags["-f"]), "calls.jsonl"), "a") as file:
    file.write(json.dumps({"flags": flags, "streams": "--streaming" in words, "libraries": os.environ["LD_LIBRARY_PATH"]}) + "\\n")
print("output of the script")
if flags["-i"] == os.environ.get("REFUSED"):
    sys.exit(99)
names = ["Concurrency", "Inferences/Second", "Server Queue", "Server Compute Infer", *(f"p{p} latency" for p in (50, 90, 95, 99))]
with open(flags["-f"], "w") as file:
    csv.writer(file).writerows([names, [flags["--concurrency-range"], 1234.56, 11, 400, 1000, 2000, 2500, 3000]])
"""


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the program by a script in the layout of the installation, with the folder of the CUDA library; and the models."""
    (tmp_path / "lib" / "python3" / "site-packages" / "nvidia" / "cuda_runtime" / "lib").mkdir(parents=True)
    file = tmp_path / "bin" / "perf_analyzer"
    file.parent.mkdir()
    file.write_text(f"#!{sys.executable}\n{SCRIPT}")
    file.chmod(0o755)
    monkeypatch.setattr(perf_analyzer, "BINARY", file)
    monkeypatch.setattr(perf_analyzer, "QUESTIONS", "words")
    monkeypatch.setattr(perf_analyzer, "SENSOR", "sensors")


def run(server: Server, out: Path, *words: str) -> int:
    return main(["perf-analyzer", "--url", f"{server.address}/", "--out", str(out), "--callers", "3", *words])


def calls(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "calls.jsonl").read_text().splitlines()]


def test_every_protocol_and_model_is_measured(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    assert run(server, out, "--grpc", "127.0.0.1:9") == 0
    cases = [(call["flags"]["-i"], call["streams"], call["flags"]["-m"], call["flags"]["-u"]) for call in calls(out)]
    rest, rpc = server.address.removeprefix("http://"), "127.0.0.1:9"
    assert cases == [
        *[("http", False, model, rest) for model in ("words", "sensors")],
        *[("grpc", False, model, rpc) for model in ("words", "sensors")],
        ("grpc", True, "sensors", rpc),
    ]
    assert all(call["libraries"].startswith(str(tmp_path / "lib" / "python3")) for call in calls(out))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "1235" in line]
    assert lines[0][-8:] == ["words", "3", "1235", "1000", "2000", "3000", "11", "400"]
    assert [" ".join(line[:-8]) for line in lines] == [REST, REST, GRPC, GRPC, STREAM]
    questions, sequences = (json.loads((out / f"{name}.json").read_text())["data"] for name in ("questions", "sequences"))
    ids = [question["ids"] for question in questions]
    assert all(len(tensor["content"]) == tensor["shape"][0] for tensor in ids), "the words of this model are unknown here"
    assert all(len(chunks) == perf_analyzer.CHUNKS for chunks in sequences)
    assert sequences[0][0]["inputs"]["shape"] == [perf_analyzer.STEPS, 3]


def test_unmeasured_case_is_reported_with_status_1(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFUSED", "http")
    assert run(server, tmp_path / "out") == 1
    printed = capsys.readouterr()
    assert "rest-words-3, status 99:\noutput of the script" in printed.err
    assert len([line for line in printed.out.splitlines() if line.endswith("failed")]) == 2


def test_missing_program_or_server_has_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["perf-analyzer", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    monkeypatch.setattr(perf_analyzer, "BINARY", tmp_path / "nothing")
    assert main(["perf-analyzer", "--out", str(tmp_path)]) == 2
    assert "make perf-analyzer" in capsys.readouterr().err
