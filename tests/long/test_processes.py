"""What takes longer than `tests/supervisor/test_processes.py`, with its service: engines end, and models are replaced."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from service.modeling import spec
from tests import models
from tests.planted import Gate
from tests.reloading import answered, load
from tests.serving import Server, eventually
from tests.supervisor.test_processes import (
    QUICK,
    Reloaded,
    ask,
    in_flight,
    refused,
    reloaded,
    restarts,
    started,
    summed,
    two_engines,
)

__all__ = ["reloaded", "started", "two_engines"]

SECRET = "the secret outside"


def scores(response: httpx.Response) -> dict[str, float]:
    """Return the scores of one sequence; the last digits depend on where it was cut into chunks."""
    outputs: list[dict[str, dict[str, float]]] = response.json()["outputs"]
    return outputs[0]["scores"]


def test_request_that_ended_two_engines_is_refused_and_others_are_answered(two_engines: Server, gate: Gate) -> None:
    """Each engine has a request. While both engines restart, requests are refused."""
    before = restarts(two_engines, "engine")
    undisturbed = scores(ask(two_engines, QUICK))
    with ThreadPoolExecutor() as pool:
        gate.let(0)
        requests = in_flight(two_engines, pool, 2)
        os.kill(two_engines.pid("engine-0"), signal.SIGKILL)
        eventually(lambda: two_engines.metric("seqserve_rerun_total") == 1)
        assert two_engines.ready(), "the other engine serves"
        os.kill(two_engines.pid("engine-1"), signal.SIGKILL)
        eventually(lambda: not two_engines.ready())
        refused = ask(two_engines, QUICK)
        assert two_engines.client.get("/healthz").status_code == 200
        gate.open()
        replies = sorted((request.result() for request in requests), key=lambda reply: reply.status_code)
    for reply in (refused, replies[1]):
        assert (reply.status_code, reply.json()["code"]) == (503, "engine_lost")
    assert int(refused.headers["retry-after"]) >= 1 and "not sent to a third" in replies[1].json()["error"]
    assert scores(replies[0]) == pytest.approx(undisturbed, abs=1e-5)
    eventually(lambda: restarts(two_engines, "engine") == before + 2)


@pytest.mark.parametrize("make", ["link", "fifo"])
def test_nothing_outside_of_the_models_folder_is_read(make: str, reloaded: Reloaded, tmp_path: Path) -> None:
    """A model is served without a card that is no file of its folder, and a linked tokenizer is refused."""
    server, root, _ = reloaded
    (tmp_path / "secret").write_text(SECRET)
    shutil.copytree(root / "words" / "1", root / "words" / "2")
    card, tokenizer = (root / "words" / "2" / name for name in (spec.CARD, spec.TOKENIZER))
    card.unlink()
    if make == "link":
        card.symlink_to(tmp_path / "secret")
    else:
        os.mkfifo(card)
    load(server, "words")
    assert answered(server)[0] == "2"
    for path in ("/models", "/models/words", "/models/words/card", "/v2/models/words/versions/2"):
        assert SECRET not in server.client.get(path).text
    tokenizer.rename(tmp_path / spec.TOKENIZER)
    if make == "link":
        tokenizer.symlink_to(tmp_path / spec.TOKENIZER)
    else:
        os.mkfifo(tokenizer)
    assert load(server, "words", status=400)["code"] == "invalid_model"
    assert answered(server)[0] == "2"


def test_socket_continues_the_version_of_its_session(reloaded: Reloaded, tmp_path: Path) -> None:
    """A second socket finds the version too, although its first chunk is not valid for the newest version."""
    server, root, _ = reloaded
    models.sensors(root, features=3, hidden=4)
    load(server, "sensors", policy={"all": {}})

    def send(stream: ClientConnection, features: int, **options: Any) -> tuple[str, int]:
        stream.send(json.dumps({"input": [[0.1] * features], **options}))
        reply = json.loads(stream.recv(timeout=30))
        return reply.get("version") or reply["code"], reply.get("session", {}).get("steps", 0)

    def open_stream(query: str) -> ClientConnection:
        return connect(server.address.replace("http", "ws") + f"/stream?model=sensors&{query}", proxy=None)

    with open_stream("session=old") as first:
        assert send(first, 3) == ("1", 1)
        models.sensors(tmp_path / "wider", features=4, hidden=4)
        shutil.move(tmp_path / "wider" / "sensors" / "1", root / "sensors" / "2")
        load(server, "sensors")
        assert send(first, 3) == ("1", 2)
        assert send(first, 4) == ("invalid_input", 0)
        with open_stream("session=old") as second:
            assert [send(second, 3), send(second, 3)] == [("1", 3), ("1", 4)]
        assert server.client.delete("/sessions/old/state").status_code == 200
        assert send(first, 3) == ("unknown_session", 0)
        assert send(first, 4, start=True) == ("2", 1)
        assert [send(first, 4), send(first, 4, end=True), send(first, 4)] == [("2", 2), ("2", 3), ("2", 1)]
    with open_stream("version=2&session=new") as exact, open_stream("version=1&session=new") as conflicting:
        assert [send(exact, 4), send(conflicting, 3)] == [("2", 1), ("session_conflict", 0)]


def test_restarted_processes_leave_out_a_model_whose_files_were_overwritten(reloaded: Reloaded) -> None:
    """The processes that have read the files compute with what they have read."""
    server, root, _ = reloaded
    before = answered(server)
    with (root / "words" / "1" / spec.WEIGHTS).open("r+b") as weights:
        weights.seek(-64, os.SEEK_END)
        weights.write(bytes(64))
    (root / "words" / "1" / spec.TOKENIZER).write_bytes(b"")
    assert answered(server) == before
    for child in ("engine-0", "engine-1", "frontend-0"):
        kill(server, child)
    eventually(lambda: server.infer("accumulator", [[2]], session="s").status_code == 200)
    assert summed(server, [1], "s") == ("1", 2)
    assert "words version 1 cannot be served" in refused(server, 503, "unavailable", "words")
    models.words(root)
    load(server, "words")
    assert answered(server) == before


def kill(server: Server, child: str) -> None:
    """Kill a process and wait until its successor serves."""
    before = len(server.events("started"))
    os.kill(server.pid(child), signal.SIGKILL)
    eventually(lambda: len(server.events("started")) > before and server.ready())
