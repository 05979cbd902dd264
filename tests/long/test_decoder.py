"""The decoder ends with its frontend and with the service."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Server, alive, eventually, serving

PADDING = " " * (64 << 10)


@pytest.fixture(scope="module")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running


def decoders(server: Server) -> list[int]:
    return [event["pid"] for event in server.events("decoder started")]


def test_killed_frontend_leaves_no_decoder(server: Server) -> None:
    body = json.dumps({"model": "words", "inputs": ["how far"]}) + PADDING
    assert server.client.post("/infer", content=body).status_code == 200
    decoder = decoders(server)[-1]
    assert alive(decoder)
    os.kill(server.pid("frontend-0"), signal.SIGKILL)
    eventually(lambda: not alive(decoder))
    eventually(server.ready)
    assert server.client.post("/infer", content=body).status_code == 200
    assert decoders(server)[-1] != decoder


def test_stopped_service_leaves_no_decoder(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, lame_duck_seconds="0") as server:
        body = json.dumps({"model": "words", "inputs": ["how far"]}) + PADDING
        assert server.client.post("/infer", content=body).status_code == 200
        [decoder] = decoders(server)
        assert server.stop(signal.SIGTERM) == 0
        eventually(lambda: not alive(decoder))
        assert not server.events("decoder ended"), "that is an error"
