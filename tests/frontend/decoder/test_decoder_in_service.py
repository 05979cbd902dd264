"""The decoder as a process beside a frontend: large bodies and messages get the same answers, in their order."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.frontend.in_process import InProcess, in_process

PADDING = " " * (64 << 10)


@pytest.fixture(scope="module")
def decoding(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with in_process(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running


def decoders(decoding: InProcess) -> list[int]:
    return [event["pid"] for event in decoding.events("decoder started")]


def test_large_bodies_of_every_kind_share_a_decoder(decoding: InProcess) -> None:
    body = json.dumps({"model": "words", "inputs": ["how far is it ?"]})
    small = decoding.client.post("/infer", content=body)
    assert not decoders(decoding), "small bodies start no decoder"
    assert decoding.client.post("/infer", content=body + PADDING).content == small.content
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["how far"]}
    request = json.dumps({"inputs": [text]})
    expected = decoding.client.post("/v2/models/words/infer", content=request)
    assert decoding.client.post("/v2/models/words/infer", content=request + PADDING).content == expected.content
    assert len(decoders(decoding)) == 1
    assert decoding.metric("seqserve_requests_in_flight") == 0


def test_large_messages_of_a_socket_stay_in_order(decoding: InProcess) -> None:
    """Every second message is large. The sums of the session follow the order in which the messages were sent."""
    chunks = [[[float(index), 0.5, -0.5]] * 3 for index in range(8)]

    def outputs(*, large: bool) -> list[Any]:
        address = decoding.address.replace("http", "ws")
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
