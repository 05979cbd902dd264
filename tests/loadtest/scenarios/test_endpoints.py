"""The endpoints scenario sends the same inputs to every endpoint, with one frontend and with several."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from loadtest import load
from loadtest.__main__ import main
from loadtest.callers import Response, Target
from loadtest.discovery import CannotMeasure
from loadtest.grpc_callers import Method
from loadtest.load import Figures
from loadtest.oip_requests import METHOD, PATH, behind_json, message
from loadtest.scenarios import endpoints
from loadtest.scenarios.endpoints import BINARY, FLOATS, GRPC, TEXT, Endpoint
from loadtest.scenarios.rounds import Trial, values_of
from service.frontend.oip import json as oip_json
from service.frontend.oip import protobuf
from tests import models
from tests.loadtest.conftest import answering, reply

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.server
def test_every_endpoint_is_timed_with_every_number_of_frontends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "models", tmp_path / "out"
    features = {"kind": "features", "features": 3, "max_steps": endpoints.STEPS}
    regress = {"kind": "regress", "pool": "last", "outputs": 2}
    models.words(folder)
    models.made_up(folder, "sensors", features, {"kind": "lstm", "hidden": 4}, head=regress)
    monkeypatch.setattr(endpoints, "QUESTIONS", "words")
    monkeypatch.setattr(endpoints, "SENSOR", "sensors")
    options = ["--frontends", "1", "2", "--callers", "4", "--seconds", "0.05", "--rounds", "2", "--out", str(out)]
    assert main(["endpoints", "--models", str(folder), *options]) == 0
    [path] = out.iterdir()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [(record["round"], record["frontends"], record["request"]) for record in records]
    assert cases == list(itertools.product((0, 1), (1, 2), (TEXT, FLOATS, BINARY, GRPC))), "rounds interleave the cases"
    for record in records:
        assert record["failed"] == 0 < record["answers"]
        assert 0 < record["p50_ms"] <= record["p90_ms"] <= record["p99_ms"]
        assert 0 <= record["busiest"] <= 1
        stages = record["stages_ms"]
        assert 0 < stages["parse"] < stages["outside"] < stages["total"]
        assert all(stages[stage] > 0 for stage in ("channel", "queue", "compute", "reply", "encode"))
    assert any(record["busiest"] for record in records), "the clock of a process may be coarser than a trial"
    assert sum(record["frontend_ms"] for record in records) < sum(record["cpu_ms"] for record in records)
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert len([line for line in printed.splitlines() if "binary REST" in line]) == 4, "a line in each table for each case"


def trial(frontends: int, round: int, answers: int) -> Trial:
    figures = Figures(1.0, [0.002] * answers)
    costs = {"cpu_ms": 0.5, "frontend_ms": 0.25, "load_ms": 0.125, "busiest": 0.75}
    stages = dict.fromkeys(endpoints.SHOWN_STAGES, 1.0)
    case = {"request": GRPC, "frontends": frontends}
    return Trial(case, round, answers, Counter(), values_of(figures) | costs, stages)


def test_rates_are_compared_with_the_first_number_of_frontends_in_each_round() -> None:
    trials = [trial(1, 0, 100), trial(2, 0, 150), trial(1, 1, 200), trial(2, 1, 500)]
    head, one, two = endpoints._table(trials)
    assert dict(zip(head, one, strict=True))["times"] == "1 (1 to 1)"
    line = dict(zip(head, two, strict=True))
    assert (line["frontends"], line["request"], line["times"]) == ("2", GRPC, "2 (1.5 to 2.5)")
    assert (line["answers/s"], line["p99 ms"]) == ("325 (150 to 500)", "2 (2 to 2)")
    assert line["frontend ms"] == "0.25 (0.25 to 0.25)"


def test_binary_requests_have_the_same_rows_over_rest_and_grpc() -> None:
    body, header = behind_json(ROWS)
    read = oip_json.parse_request(body, header, "sensors", "")
    assert read.raw("value"), "the answer is raw as well"
    for request in (read.request, protobuf.infer_request(METHOD.parse(message("sensors", ROWS)))):
        assert request.model == "sensors"
        [tensor] = request.inputs
        assert np.array_equal(tensor.values, ROWS)


def endpoint(target: Target, name: str = FLOATS) -> Endpoint:
    return Endpoint(name, {"name": "sensors"}, target, itertools.repeat(target.request(b"{}")), endpoints.read_value)


def test_nothing_is_timed_before_the_endpoints_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("127.0.0.1", 9, "/infer")
    replies = {FLOATS: b'{"outputs": [{"value": [1.0, 2.0]}]}', BINARY: b'{"outputs": [{"value": [1.0, 2.5]}]}'}

    async def first_replies(endpoint: Endpoint) -> list[Response]:
        return [Response(200, replies[endpoint.name])]

    monkeypatch.setattr(endpoints, "first_replies", first_replies)
    endpoints.check_agreement([endpoint(target), endpoint(target)])
    with pytest.raises(CannotMeasure, match="binary REST returns other numbers"):
        endpoints.check_agreement([endpoint(target), replace(endpoint(target), name=BINARY)])


def test_refusing_endpoint_is_named_with_the_reason() -> None:
    async def handler(number: int) -> bytes:
        return reply(b'{"error": "wait", "code": "overloaded"}', 503)

    async def run() -> None:
        async with answering(handler) as target:
            await endpoints.first_replies(endpoint(target))

    with pytest.raises(CannotMeasure, match="JSON floats is refused with 503 overloaded"):
        asyncio.run(run())


def test_grpc_caller_returns_raw_answers_and_error_names() -> None:
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
        requests = (itertools.repeat(data) for data in (b"yes", b"no"))
        answers, refusals = [await load.closed(method, each, 2, 0.2) for each in requests]
        await server.stop(None)
        return answers, refusals

    answers, refusals = asyncio.run(run())
    assert len(answers.answers) > 2 and not answers.failed
    assert not refusals.answers and set(refusals.failures) == {"14 UNAVAILABLE"}


def test_request_headers_replace_the_default() -> None:
    target = Target("host", 80, "/infer")
    assert b"Content-Type: application/json\r\n" in target.request(b"{}")
    request = target.request(b"{}", "Content-Type: application/octet-stream", "A: b")
    assert b"json" not in request and b"\r\nA: b\r\nContent-Length: 2\r\n\r\n{}" in request
