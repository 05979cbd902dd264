"""Every endpoint of the service, with one frontend and with several, under the same load.

The endpoints get a question as JSON text, rows of a sensor as JSON, the same rows as raw bytes after JSON (Open Inference Protocol over
REST), and the same rows as raw bytes in a gRPC message.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from loadtest import discovery, servers
from loadtest.bench import StageCounts, requests_of
from loadtest.callers import Connectable, Response, Target
from loadtest.discovery import CannotMeasure
from loadtest.generator.readers import refusal
from loadtest.grpc_callers import Method
from loadtest.load import Figures
from loadtest.oip_requests import METHOD, PATH, behind_json, message
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import Contender, Trial
from loadtest.traffic import Traffic
from service.frontend.oip.json import HEADER_LENGTH

SUMMARY = "every endpoint, with one frontend and with several"
QUESTIONS, SENSOR = "question-type", "sensor-forecast"
TEXT, FLOATS, BINARY, GRPC = "JSON text", "JSON floats", "binary REST", "gRPC"
FRONTENDS = (1, 2, 4)
STEPS = 64
"""Rows of a sensor's sequence."""
REQUESTS = 200
"""Distinct requests of each kind, sent in a cycle."""
COMPARED = 8
"""Requests that every endpoint must answer alike before any of them is timed."""
COLUMNS = ("p50_ms", "p99_ms", "cpu_ms", "frontend_ms", "load_ms", "busiest")
ENGINE_STAGES = ("queue", "stage_in", "device_wait", "compute", "stage_out")
SHOWN_STAGES = ("parse", "channel", "queue", "compute", "reply", "encode", "total", "outside")
PACKAGES = ("torch", "fastapi", "uvicorn", "uvloop", "httptools", "grpcio", "msgspec")

Sample = tuple[list[float], StageCounts]
"""Seconds of processor time, and the counts of stages."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One kind of request to one server. read: returns the numbers in an answer, for the comparison."""

    name: str
    model: dict[str, Any]
    target: Connectable
    requests: Iterator[bytes]
    read: Callable[[bytes], Sequence[float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frontends", type=int, nargs="+", default=FRONTENDS, help="numbers of frontends")
    parser.add_argument("--models", type=Path, default=servers.MODELS, help="models folder")
    parser.add_argument("--callers", type=int, default=32, help="concurrent callers")
    rounds.add_options(parser, seconds=3.0, rounds=5)


def run(options: argparse.Namespace) -> int:
    """Measure every endpoint. Returns 1 when a request failed."""
    commands = [servers.seqserve("--models", str(options.models), "--frontends", str(number)) for number in options.frontends]
    with servers.all_running(*commands) as started:
        contenders = [
            (endpoint, server, number)
            for server, number in zip(started, options.frontends, strict=True)
            for endpoint in endpoints_of(server, options.models)
        ]
        check_agreement([endpoint for endpoint, *_ in contenders])
        trials = rounds.alternate([_contender(*each, options.callers) for each in contenders], options)
    return rounds.publish("endpoints", trials, [list(_table(trials)), list(_stage_table(trials))], options, PACKAGES)


def endpoints_of(server: servers.ServerProcess, models: Path) -> list[Endpoint]:
    """Return the endpoints of a server. The last three get the same rows."""
    questions, sensor = discovery.find(server.url, QUESTIONS), discovery.find(server.url, SENSOR)
    texts = discovery.inputs(models, questions)
    infer, tensors = Target.of(server.url, "/infer"), Target.of(server.url, f"/v2/models/{SENSOR}/infer")
    method = Method(server.grpc, PATH)
    traffic = Traffic(sensor)
    lists = [traffic.input(STEPS) for _ in range(REQUESTS)]
    arrays = [np.array(rows, np.float32) for rows in lists]
    return [
        Endpoint(TEXT, questions, infer, itertools.cycle(requests_of(infer, texts, inputs=1)), _read_score),
        Endpoint(FLOATS, sensor, infer, itertools.cycle([_json_floats(infer, rows) for rows in lists]), read_value),
        Endpoint(BINARY, sensor, tensors, itertools.cycle([_binary(tensors, rows) for rows in arrays]), _read_behind_json),
        Endpoint(GRPC, sensor, method, itertools.cycle([message(SENSOR, rows) for rows in arrays]), _read_message),
    ]


def _json_floats(target: Target, rows: Any) -> bytes:
    return target.request(json.dumps({"model": SENSOR, "inputs": [rows]}).encode())


def _binary(target: Target, rows: NDArray[np.float32]) -> bytes:
    body, header = behind_json(rows)
    return target.request(body, "Content-Type: application/octet-stream", f"{HEADER_LENGTH}: {header}")


def _read_score(answer: bytes) -> Sequence[float]:
    return [json.loads(answer)["outputs"][0]["score"]]


def read_value(answer: bytes) -> Sequence[float]:
    """Return the `value` of the first output of a JSON answer."""
    value: Sequence[float] = json.loads(answer)["outputs"][0]["value"]
    return value


def _read_behind_json(answer: bytes) -> Sequence[float]:
    header, end = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    assert header["outputs"][0]["parameters"]["binary_data_size"] == len(answer) - end
    return _floats(answer[end:])


def _read_message(answer: bytes) -> Sequence[float]:
    [raw] = METHOD.response_type.FromString(answer).raw_output_contents
    return _floats(raw)


def _floats(raw: bytes) -> list[float]:
    values: list[float] = np.frombuffer(raw, "<f4").tolist()
    return values


def check_agreement(endpoints: Sequence[Endpoint]) -> None:
    """Exit unless every endpoint of a model returns the same numbers for the same inputs."""
    expected: dict[str, list[Sequence[float]]] = {}
    for endpoint in endpoints:
        numbers = [endpoint.read(reply.body) for reply in uvloop.run(first_replies(endpoint))]
        reference = expected.setdefault(endpoint.model["name"], numbers)
        if not np.allclose(numbers, reference, rtol=1e-5, atol=1e-6):
            raise CannotMeasure(
                f"{endpoint.name} returns other numbers than the first endpoint of {endpoint.model['name']}, so nothing is "
                f"timed: {numbers} and {reference}"
            )


async def first_replies(endpoint: Endpoint) -> list[Response]:
    """Return the replies to the first requests of an endpoint. Exits when a request is refused."""
    connection = await endpoint.target.connect()
    replies = [await connection.ask(request) for request in itertools.islice(endpoint.requests, COMPARED)]
    connection.hang_up()
    for reply in replies:
        if reply.status != 200:
            raise CannotMeasure(f"{endpoint.name} is refused with {refusal(reply.status, reply.body)}")
    return replies


def _contender(endpoint: Endpoint, server: servers.ServerProcess, frontends: int, callers: int) -> Contender:
    """Return one endpoint with the cost of its answers.

    Milliseconds of processor time for each answer: cpu_ms of all processes of the server, frontend_ms of its frontends, load_ms of the
    load generator. busiest: the share of the frontends' time that the busiest frontend used. Stages are mean milliseconds; `outside` is
    the part of `total` that is spent neither in the engine's queue nor in a batch.
    """

    def sample() -> Sample:
        cpu_seconds = [time.process_time(), server.cpu_seconds(), *server.cpu_seconds_each("service.frontend")]
        return cpu_seconds, StageCounts.read(server.url, endpoint.model)

    def costs(figures: Figures, before: Sample, after: Sample) -> tuple[dict[str, float], dict[str, float]]:
        used = [end - begin for end, begin in zip(after[0], before[0], strict=True)]
        load_ms, cpu_ms, *each = (1000 * value / max(1, len(figures.answers)) for value in used)
        stages = after[1].stages(before[1]) | {"total": after[1].total(before[1])}
        stages["outside"] = stages["total"] - sum(stages[stage] for stage in ENGINE_STAGES)
        busiest = max(each) / (sum(each) or 1)
        return {"cpu_ms": cpu_ms, "frontend_ms": sum(each), "load_ms": load_ms, "busiest": busiest}, stages

    case = {"request": endpoint.name, "model": endpoint.model["name"], "frontends": frontends, "callers": callers}
    return Contender(case, endpoint.target, endpoint.requests, callers, sample, costs)


def _table(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yield one line for each case. times: the rate, compared with the first number of frontends in the same round."""
    yield ["frontends", "request", "answers/s", "times", *rounds.headings(COLUMNS)]
    for case in rounds.by_case(trials):
        first = case[0].case | {"frontends": trials[0].case["frontends"]}
        alone = [trial for trial in trials if trial.case == first]
        [rate], times = rounds.spreads(case, ["answers/s"]), rounds.ratios(case, alone, ["answers/s"])
        yield [*_labels(case), rate, *times, *rounds.spreads(case, COLUMNS)]


def _stage_table(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yield the mean milliseconds by stage."""
    yield ["frontends", "request", *(f"{stage} ms" for stage in SHOWN_STAGES)]
    for case in rounds.by_case(trials):
        yield [*_labels(case), *rounds.spreads(case, SHOWN_STAGES)]


def _labels(case: Sequence[Trial]) -> list[str]:
    return [str(case[0].case["frontends"]), case[0].case["request"]]
