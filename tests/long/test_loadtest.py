"""Every kind of load on running servers, two versions side by side, and baselines with the scores of the service."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop
import websockets

from loadtest import bench, requests
from loadtest.__main__ import main
from loadtest.baselines.classifier import TextClassifier
from loadtest.comparison import models
from loadtest.discovery import CannotMeasure
from loadtest.generator import websocket
from loadtest.generator.job import Job, Result
from loadtest.generator.loops import run
from loadtest.generator.readers import TOLERANCE
from loadtest.requests import KINDS, Clients
from loadtest.scenarios import compare
from loadtest.servers import ROOT
from loadtest.traffic import Traffic, words
from service import cli, local
from service.settings import Settings
from tests.serving import Server


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_client_gets_answers(
    kind: str, server: Server, models_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"QUESTIONS": "words", "SENSOR": "sensors", "REQUESTS": 20}.items():
        monkeypatch.setattr(requests, name, value)
    addresses: Any = SimpleNamespace(url=server.address, grpc=server.grpc)
    job = KINDS[kind](Clients(server.address, models_folder)).job(addresses, callers=2, seconds=2.0)
    result = uvloop.run(run(job))
    assert result.answers and not result.failures
    for number in range(requests.SESSIONS if kind == "chunk" else 0):
        server.client.delete(f"/sessions/load-{number}/state")


def test_bench_of_an_open_loop_and_its_errors(
    server: Server, models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.1)
    command = ["bench", "--url", server.address, "--models", str(models_folder), "--seconds", "0.5"]
    opened = ["--model", "sensors", "--rates", "50", "--arrivals", "bursty", "--inputs", "2", "--seed", "4"]
    assert cli.main([*command, *opened, "--json", str(tmp_path / "records")]) == 0
    assert "inputs a request: 2 (rows of 3 numbers), seed 4\nopen loop, bursty arrivals" in capsys.readouterr().out
    assert json.loads((tmp_path / "records").read_text())["rate"] == 50
    assert cli.main([*command, "--model", "words", "--inputs", "65"]) == 1
    assert "failed with status 413 too_large" in capsys.readouterr().out
    assert cli.main(["bench", "--url", "http://127.0.0.1:9", "--model", "unknown"]) == 1
    assert cli.main(["bench", "--url", server.address, "--model", "unknown"]) == 1
    assert cli.main([*command, "--model", "words", "--trace", str(tmp_path / "trace.json")]) == 1
    printed = capsys.readouterr().err
    assert "--url" in printed and "serves no model unknown" in printed and "SEQSERVE_DEBUG" in printed


def test_tree_is_compared_with_itself(tmp_path: Path) -> None:
    names = ["text, 1 caller", "chunk, 4 in flight", "WebSocket, 4 in flight"]
    command = ["compare", str(ROOT), str(ROOT), "--pairs", "1", "--floor", "0", "--cell-floor", "0", "--cells", *names]
    assert main([*command, "--logs", str(tmp_path), "--out", str(tmp_path), "--seconds", "2"]) == 0
    [path] = tmp_path.glob("compare-*.json")
    [record] = json.loads(path.read_text()).values()
    values = [values for cell in record["cells"].values() for values in cell.values()]
    assert list(record["cells"]) == names
    assert all(each["old"] > 0 < each["new"] and np.isfinite(each["ratio"]) for each in values)


def test_each_server_runs_the_code_of_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "broken"
    (old / "service").mkdir(parents=True)
    (old / "service" / "__main__.py").write_text("raise SystemExit('this is another version')")
    (old / "constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    assert main(["compare", str(old), str(ROOT), "--logs", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "this is another version" in (tmp_path / "old.log").read_text()
    assert str(tmp_path / "old.log") in capsys.readouterr().err
    with pytest.raises(CannotMeasure, match="neither a folder with the project nor a commit"):
        compare._checked_out("no-such-commit", tmp_path)
    version = compare._checked_out("HEAD", tmp_path / "head")
    assert len(version.name) == 10 and (version.folder / "service" / "__main__.py").is_file()


def test_socket_has_as_many_open_requests_as_it_may() -> None:
    """The server answers only when four requests are open."""

    async def serve(socket: websockets.ServerConnection) -> None:
        while True:
            for request in [await socket.recv() for _ in range(4)]:
                await socket.send(request)

    async def measured() -> Result:
        async with websockets.serve(serve, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            frames = [websocket.frame(websocket.TEXT_FRAME, b'{"scores": [0.5]}')]
            return await run(Job("websocket", "127.0.0.1", port, "/", frames, "scores", [[0.5]], in_flight=4, grace=0.0))

    assert uvloop.run(measured()).answers > 0


@pytest.mark.parametrize("name", models.MODELS)
def test_baselines_return_the_scores_of_the_service(name: str, tmp_path: Path) -> None:
    """Else the comparison would not be fair."""
    models.write(tmp_path)
    version = tmp_path / name / "1"
    description = {"name": name, "version": "1", "min_steps": 1, "input": {"kind": "text", "max_steps": 512}}
    known = words((version / "tokenizer.json").read_text())
    texts = ["Who wrote Hamlet ?", "What", *Traffic(description, known[-500:]).body(20)["inputs"]]
    ours = [list(output["scores"].values()) for output in local.infer(Settings(device="cpu", models=tmp_path), name, texts)]
    assert max(map(max, ours)) - min(map(min, ours)) > 100 * TOLERANCE, "wrong scores would be noticed"
    for expected, batched in zip(ours, TextClassifier(version).scores(texts), strict=True):
        assert batched == pytest.approx(expected, abs=TOLERANCE / 10)
