"""Each door is asked the same, by a server with one front and by one with several, and nothing is left out."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from loadtest import bench_endpoints, load
from loadtest.bench_endpoints import BINARY, FLOATS, GRPC, TEXT, Cell, GrpcServer
from loadtest.callers import Reply, Target
from loadtest.grpc_callers import Method
from loadtest.load import Figures
from loadtest.oip_requests import METHOD, PATH, behind_json, message
from service.frontend.oip import json as oip_json
from service.frontend.oip import protobuf_codec
from tests.loadtest.conftest import answering, reply

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_every_door_is_timed_with_every_number_of_fronts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--frontends", "1", "2", "--callers", "4", "--seconds", "0.15", "--rounds", "2", "--out", str(tmp_path)]
    assert bench_endpoints.main(said) == 0
    [path] = tmp_path.iterdir()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [(record["round"], record["frontends"], record["request"]) for record in records]
    assert cases == list(itertools.product((0, 1), (1, 2), (TEXT, FLOATS, BINARY, GRPC))), "rounds interleave the cases"
    for record in records:
        assert record["failed"] == 0 < record["answers"]
        assert 0 < record["p50_ms"] <= record["p90_ms"] <= record["p99_ms"]
        assert 0 < record["busiest"] <= 1
        stages = record["stages_ms"]
        assert 0 < stages["parse"] < stages["outside"] < stages["total"]
        assert all(stages[stage] > 0 for stage in ("channel", "queue", "compute", "encode"))
    assert sum(record["front_ms"] for record in records) < sum(record["cpu_ms"] for record in records)
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert len([line for line in printed.splitlines() if "binary REST" in line]) == 4, "a line in each table for each case"


def cell(frontends: int, round: int, answers: int) -> Cell:
    return Cell(
        GRPC,
        frontends,
        round,
        Figures(1.0, [0.002] * answers),
        0.5,
        0.25,
        0.125,
        0.75,
        dict.fromkeys(bench_endpoints.SHOWN, 1.0),
    )


def test_more_fronts_are_compared_with_the_first_number_of_them_in_the_same_round() -> None:
    cells = [cell(1, 0, 100), cell(2, 0, 150), cell(1, 1, 200), cell(2, 1, 500)]
    head, one, two = bench_endpoints._table(cells)
    assert dict(zip(head, one, strict=True))["times"] == "1 (1 to 1)"
    found = dict(zip(head, two, strict=True))
    assert (found["frontends"], found["request"], found["times"]) == ("2", GRPC, "2 (1.5 to 2.5)")
    assert (found["answers/s"], found["p99 ms"], found["front ms"]) == ("325 (150 to 500)", "2 (2 to 2)", "0.25 (0.25 to 0.25)")


def test_binary_requests_say_the_same_rows_as_the_doors_read_them() -> None:
    body, header = behind_json(ROWS)
    asked = oip_json.read(body, header, "sensors", "")
    assert asked.raw("value"), "the answer is raw as well"
    for request in (asked.request, protobuf_codec.request(METHOD.read(message("sensors", ROWS)))):
        assert request.model == "sensors"
        [tensor] = request.inputs
        assert np.array_equal(tensor.values, ROWS)


def door(target: Target, name: str = FLOATS) -> GrpcServer:
    return GrpcServer(name, {"name": "sensors"}, target, itertools.repeat(target.request(b"{}")), bench_endpoints._value)


def test_nothing_is_timed_before_the_doors_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("127.0.0.1", 9, "/infer")
    replies = {FLOATS: b'{"outputs": [{"value": [1.0, 2.0]}]}', BINARY: b'{"outputs": [{"value": [1.0, 2.5]}]}'}

    async def asked(door: GrpcServer) -> list[Reply]:
        return [Reply(200, replies[door.name])]

    monkeypatch.setattr(bench_endpoints, "_asked", asked)
    bench_endpoints._agree([door(target), door(target)])
    with pytest.raises(SystemExit, match="binary REST is answered otherwise"):
        bench_endpoints._agree([door(target), replace(door(target), name=BINARY)])


def test_a_door_that_refuses_is_named_with_the_reason() -> None:
    async def handler(number: int) -> bytes:
        return reply(b'{"error": "wait", "code": "overloaded"}', 503)

    async def run() -> None:
        async with answering(handler) as target:
            await bench_endpoints._asked(door(target))

    with pytest.raises(SystemExit, match="JSON floats is refused with 503 overloaded"):
        asyncio.run(run())


def test_a_grpc_caller_has_answers_as_they_came_and_errors_by_their_names() -> None:
    async def twice(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if data == b"no":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "wait")
        return 2 * data

    async def run() -> tuple[Figures, Figures]:
        server = grpc.aio.server()
        handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(twice)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PATH.split("/")[1], handlers),))
        method = Method(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", PATH)
        await server.start()
        connection = await method.connect()
        assert await connection.ask(b"ab") == (200, b"abab")
        connection.hang_up()
        requests = (itertools.repeat(one) for one in (b"yes", b"no"))
        answers, refusals = [await load.closed(method, one, 2, 0.2, lambda _: None) for one in requests]
        await server.stop(None)
        return answers, refusals

    answers, refusals = asyncio.run(run())
    assert len(answers.answers) > 2 and not answers.failed
    assert not refusals.answers and set(refusals.failures) == {"14 UNAVAILABLE"}


def test_a_request_may_have_headers_of_its_own() -> None:
    target = Target("host", 80, "/infer")
    assert b"Content-Type: application/json\r\n" in target.request(b"{}")
    own = target.request(b"{}", "Content-Type: application/octet-stream", "A: b")
    assert b"json" not in own and b"\r\nA: b\r\nContent-Length: 2\r\n\r\n{}" in own
