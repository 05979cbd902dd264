"""The decoder as a process of a running service."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.serving import Server, alive, eventually, serving

PADDING = " " * (64 << 10)


@pytest.fixture(scope="module")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running


def decoders(server: Server) -> list[int]:
    return [event["pid"] for event in server.events("decoder started")]


def test_large_bodies_of_every_kind_share_a_decoder(server: Server) -> None:
    body = json.dumps({"model": "words", "inputs": ["how far is it ?"]})
    small = server.client.post("/infer", content=body)
    assert not decoders(server), "small bodies start no decoder"
    assert server.client.post("/infer", content=body + PADDING).content == small.content
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["how far"]}
    request = json.dumps({"inputs": [text]})
    expected = server.client.post("/v2/models/words/infer", content=request)
    assert server.client.post("/v2/models/words/infer", content=request + PADDING).content == expected.content
    assert len(decoders(server)) == 1
    assert server.metric("seqserve_requests_in_flight") == 0


def test_large_messages_of_a_socket_stay_in_order(server: Server) -> None:
    """Every second message is large. The sums of the session follow the order in which the messages were sent."""
    chunks = [[[float(index), 0.5, -0.5]] * 3 for index in range(8)]

    def outputs(*, large: bool) -> list[Any]:
        address = server.address.replace("http", "ws")
        with connect(f"{address}/stream?model=sensors", max_size=None) as stream:
            for index, chunk in enumerate(chunks):
                padding = PADDING if large and index % 2 else ""
                stream.send(json.dumps({"input": chunk}) + padding)
            stream.send(struct.pack("<3f", 1, 2, 3))
            stream.send(json.dumps({"input": "text"}) + PADDING * large)
            return [json.loads(stream.recv()) for _ in range(len(chunks) + 2)]

    expected, replies = outputs(large=False), outputs(large=True)
    assert [reply.get("error") for reply in replies] == [reply.get("error") for reply in expected]
    assert [reply["session"]["steps"] for reply in replies[:-1]] == [*range(3, 25, 3), 25]
    for reply, other in zip(replies[:-1], expected[:-1], strict=True):
        assert reply["outputs"][0]["scores"] == pytest.approx(other["outputs"][0]["scores"], abs=1e-6)


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
