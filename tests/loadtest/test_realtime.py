"""Streams in real time: each answer is checked, and latency counts from the moment of a chunk, however late it is sent or answered."""

from __future__ import annotations

import json
import struct
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from websockets.asyncio.server import ServerConnection, serve

from loadtest import realtime
from loadtest.generator.job import Job, Result
from loadtest.generator.loops import ENDED, WRONG, run
from loadtest.generator.readers import stream
from loadtest.generator.websocket import BINARY_FRAME, frame
from service.cli import main
from tests.serving import Server

CHUNKS, PERIOD = 200, 0.02
Answer = Callable[[int, float], Awaitable[dict[str, Any]]]
"""Returns the answer to a chunk from the number and the sum of the steps of its session."""


async def right(steps: int, total: float) -> dict[str, Any]:
    return {"outputs": [{"value": [total]}], "session": {"steps": steps}}


def streamed(answer: Answer, streams: int = 2) -> Result:
    """Return the result of streams of one step a chunk on a server that answers with the sums of their sessions."""

    async def handle(socket: ServerConnection) -> None:
        steps, total = 0, 0.0
        async for message in socket:
            assert isinstance(message, bytes)
            steps, total = steps + 1, total + struct.unpack("<f", message)[0]
            await socket.send(json.dumps(await answer(steps, total)))

    async def measured() -> Result:
        async with serve(handle, "127.0.0.1", 0) as server:
            host, port = next(iter(server.sockets)).getsockname()
            requests = [frame(BINARY_FRAME, struct.pack("<f", number)) for number in range(CHUNKS)]
            sums = [[number + 1.0, sum(range(number + 1))] for number in range(CHUNKS)]
            load: dict[str, Any] = {"callers": streams, "seconds": 0.4, "period": PERIOD, "chunks": CHUNKS}
            return await run(Job("websocket", host, port, "/", requests, "stream", sums, **load))

    return uvloop.run(measured())


def test_every_chunk_is_sent_and_compared_with_the_sum() -> None:
    result = streamed(right)
    assert not result.failures and result.due >= 2 * 18
    assert result.due == len(result.ordered_latencies()) == len(array("d", result.delays))


@pytest.mark.parametrize(
    "fault, reason",
    [
        ({"outputs": [{"value": [11.0]}], "session": {"steps": 5}}, WRONG),
        ({"error": "", "code": "overloaded"}, "status 400 overloaded"),
    ],
)
def test_stream_ends_with_a_wrong_or_refused_chunk(fault: dict[str, Any], reason: str) -> None:
    """The fifth chunk should be answered with the sum 10 and 5 steps."""

    async def answer(steps: int, total: float) -> dict[str, Any]:
        return fault if steps == 5 else await right(steps, total)

    result = streamed(answer)
    assert result.failures[reason] == 2 and result.failures[ENDED] > 20
    assert len(result.ordered_latencies()) == result.due - sum(result.failures.values()) < 10


def test_steps_of_a_long_session_are_exact() -> None:
    answer = b'{"outputs": [{"value": [10.5], "label": "x"}], "session": {"id": "7", "steps": 1000}}'
    assert stream(answer, [1000.0, 10.5]) == [1000, 10.5]
    with pytest.raises(ValueError, match="1000 steps instead of 999"):
        stream(answer, [999.0, 10.5])


def test_refused_first_chunk_is_an_error() -> None:
    async def answer(steps: int, total: float) -> dict[str, Any]:
        return {"error": "", "code": "too_many_sessions"}

    with pytest.raises(OSError, match="after 0 open streams another was refused: status 400 too_many_sessions"):
        streamed(answer)


def test_latency_counts_from_the_moment_of_a_chunk() -> None:
    """The server pauses the loop that it shares with the generator, and all chunks that were due meanwhile are sent afterwards."""

    async def answer(steps: int, total: float) -> dict[str, Any]:
        if steps == 5:
            time.sleep(0.2)
        return await right(steps, total)

    result = streamed(answer, streams=1)
    assert not result.failures
    late = [latency for latency in result.ordered_latencies() if latency > PERIOD]
    assert len(late) >= 8 and late[-1] > 0.19 and max(array("d", result.delays)) > 0.17


def test_streams_of_a_server_are_measured(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(realtime, "WARM_UP_SECONDS", 0.1)
    monkeypatch.setattr(realtime, "BEHIND_MS", 60_000.0)
    words = ["bench", "--url", server.address, "--realtime", "3", "--period-ms", "50", "--steps", "2", "--seconds", "0.5"]
    assert main([*words, "--json", str(tmp_path / "records")]) in (0, 1)  # a busy machine may answer after a period
    record = json.loads((tmp_path / "records").read_text())
    assert (record["streams"], record["lost"], record["failures"]) == (3, 0, {}) and record["due"] >= 24
    assert record["frontends_us"] > 0 < record["engine_us"], "the processes of a local server are found"
    monkeypatch.setattr(realtime, "BEHIND_MS", 0.0)
    monkeypatch.setattr(realtime, "BEHIND_PERIODS", 0.0)
    assert main(words) == 1
    assert "the load generator was late with 3 streams: it sent" in capsys.readouterr().err


@pytest.mark.parametrize("capacity", [0, 1, 30, 100, 777])
def test_largest_number_is_found_by_doubling_and_bisection(capacity: int) -> None:
    steps: list[int] = []

    def sustains(count: int) -> bool:
        steps.append(count)
        return count <= capacity

    found = realtime.largest(sustains, 50)
    assert found <= capacity <= max(found + 1, 1.05 * found) and len(steps) < 12
