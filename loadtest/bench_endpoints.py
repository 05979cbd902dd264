"""`python -m loadtest.bench_endpoints`: what each door costs, and what more fronts give: the same callers with four kinds of requests.

A question as JSON text, rows of a sensor as JSON, the same rows raw behind JSON (Open Inference Protocol over REST), and the same rows raw
in a gRPC message. Servers with one front and with several run at once and are loaded in turn, so that whatever else the machine does meets
all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from numpy.typing import NDArray

from kernels.bench.report import device_name, slug
from loadtest import discovery, load, report, servers
from loadtest.bench import Counts, described, prepared
from loadtest.callers import Reachable, Reply, Target
from loadtest.grpc_callers import Method
from loadtest.load import Figures
from loadtest.oip_requests import METHOD, PATH, behind_json, message
from loadtest.traffic import Traffic
from service.frontend.oip.json import HEADER_LENGTH

QUESTIONS, SENSOR = "question-type", "sensor-forecast"
TEXT, FLOATS, BINARY, GRPC = "JSON text", "JSON floats", "binary REST", "gRPC"
FRONTS = (1, 2, 4)
STEPS = 64
"""Of a sensor's rows."""
REQUESTS = 200
"""Different ones of each kind, sent in turn."""
COMPARED = 8
"""So many of them must be answered alike at all doors before any is timed."""
COLUMNS = ("answers/s", "p50", "p99", "CPU", "frontend", "load", "busiest")
ENGINE = ("queue", "stage_in", "compute", "stage_out")
SHOWN = ("parse", "channel", "queue", "compute", "encode", "total", "outside")
PACKAGES = ("torch", "fastapi", "uvicorn", "uvloop", "httptools", "grpcio", "msgspec")


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """One kind of request to one server; said: what an answer says, to be compared."""

    name: str
    model: dict[str, Any]
    target: Reachable
    requests: Iterator[bytes]
    said: Callable[[bytes], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of request to a server with so many fronts in one round.

    Milliseconds of processor time for each answer: cpu_ms of all the server's processes, front_ms of its fronts, load_ms of who asks.
    busiest: the share of the fronts' time that one of them took; it may have got most of the connections.
    stages: mean milliseconds by stage; channel: of the way to the engine; outside: of all that is neither the engine's queue nor a turn.
    """

    door: str
    frontends: int
    round: int
    figures: Figures
    cpu_ms: float
    front_ms: float
    load_ms: float
    busiest: float
    stages: dict[str, float]

    def value(self, name: str) -> float:
        """One of COLUMNS, or of the stages."""
        if name in report.QUANTILES:
            return report.milliseconds(self.figures)[name]
        costs = {"CPU": self.cpu_ms, "frontend": self.front_ms, "load": self.load_ms, "busiest": self.busiest}
        return {"answers/s": self.figures.rate, **costs, **self.stages}[name]


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 when a request failed: then there is nothing to compare."""
    said = _parser().parse_args(arguments)
    machine = device_name(torch.device("cpu"))
    cells = list(_measured(said.frontends, said.callers, said.seconds, said.rounds))
    print(f"\n{machine}, {date.today()}: {said.callers} callers, medians of {said.rounds} rounds (lowest to highest)\n")
    print("\n".join(report.table(list(_table(cells)))))
    print("\nms by stage, medians of each round's mean\n")
    print("\n".join(report.table(list(_stages_table(cells)))) + "\n", flush=True)
    where = report.where(machine, PACKAGES)
    report.write(said.out / f"doors-{slug(machine)}.jsonl", [_record(cell, said.callers) | where for cell in cells])
    for cell in cells:
        for reason, count in cell.figures.failures.most_common():
            print(f"{cell.door}, {cell.frontends} fronts: {count} failed with {reason}")
    return 1 if any(cell.figures.failed for cell in cells) else 0


def _measured(frontends: Sequence[int], callers: int, seconds: float, rounds: int) -> Iterator[Cell]:
    with ExitStack() as stack:
        running = {
            count: stack.enter_context(servers.running(*servers.seqserve("--frontends", str(count)))) for count in frontends
        }
        opened = {count: doors(server) for count, server in running.items()}
        _agree([door for found in opened.values() for door in found])
        for round in range(rounds):
            for count, server in running.items():
                for door in opened[count]:
                    cell = _cell(server, door, count, callers, round, seconds)
                    print(report.progress(f"{door.name} {count}", cell.figures, seconds), file=sys.stderr, flush=True)
                    yield cell


def doors(server: servers.Server) -> list[GrpcServer]:
    """The kinds of requests, of which the last three carry the same rows."""
    questions, sensor = described(server.url, QUESTIONS), described(server.url, SENSOR)
    texts = discovery.inputs(servers.MODELS, questions)
    infer, tensors = Target.of(server.url, "/infer"), Target.of(server.url, f"/v2/models/{SENSOR}/infer")
    method = Method(server.grpc, PATH)
    traffic = Traffic(sensor)
    lists = [traffic.input(STEPS) for _ in range(REQUESTS)]
    rows = [np.array(one, np.float32) for one in lists]
    return [
        GrpcServer(TEXT, questions, infer, prepared(infer, texts, inputs=1), _score),
        GrpcServer(FLOATS, sensor, infer, itertools.cycle([_floats(infer, one) for one in lists]), _value),
        GrpcServer(BINARY, sensor, tensors, itertools.cycle([_binary(tensors, one) for one in rows]), _behind_json),
        GrpcServer(GRPC, sensor, method, itertools.cycle([message(SENSOR, one) for one in rows]), _in_message),
    ]


def _floats(target: Target, rows: Any) -> bytes:
    return target.request(json.dumps({"model": SENSOR, "inputs": [rows]}).encode())


def _binary(target: Target, rows: NDArray[np.float32]) -> bytes:
    body, header = behind_json(rows)
    return target.request(body, "Content-Type: application/octet-stream", f"{HEADER_LENGTH}: {header}")


def _score(answer: bytes) -> Sequence[float]:
    return [json.loads(answer)["outputs"][0]["score"]]


def _value(answer: bytes) -> Sequence[float]:
    value: Sequence[float] = json.loads(answer)["outputs"][0]["value"]
    return value


def _behind_json(answer: bytes) -> Sequence[float]:
    said, end = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    assert said["outputs"][0]["parameters"]["binary_data_size"] == len(answer) - end
    return _numbers(answer[end:])


def _in_message(answer: bytes) -> Sequence[float]:
    [raw] = METHOD.gives.FromString(answer).raw_output_contents
    return _numbers(raw)


def _numbers(raw: bytes) -> list[float]:
    found: list[float] = np.frombuffer(raw, "<f4").tolist()
    return found


def _agree(found: Sequence[GrpcServer]) -> None:
    """Nothing is timed before the same model says the same of the same values, at each door and with any number of fronts."""
    first: dict[str, list[Sequence[float]]] = {}
    for door in found:
        said = [door.said(reply.body) for reply in uvloop.run(_asked(door))]
        other = first.setdefault(door.model["name"], said)
        if not np.allclose(said, other, rtol=1e-5, atol=1e-6):
            raise SystemExit(
                f"{door.name} is answered otherwise than the first door to {door.model['name']}: {said} and {other}"
            )


async def _asked(door: GrpcServer) -> list[Reply]:
    """What its first requests are answered, one after the other."""
    connection = await door.target.connect()
    replies = [await connection.ask(request) for request in itertools.islice(door.requests, COMPARED)]
    connection.hang_up()
    for reply in replies:
        if reply.status != 200:
            raise SystemExit(f"{door.name} is refused with {load.reason(reply)}")
    return replies


def _cell(server: servers.Server, door: GrpcServer, frontends: int, callers: int, round: int, seconds: float) -> Cell:
    uvloop.run(load.closed(door.target, door.requests, callers, seconds / 4, lambda _: None))
    before, counts = _seconds(server), Counts.read(server.url, door.model)
    figures = uvloop.run(load.closed(door.target, door.requests, callers, seconds, lambda _: None))
    used = [now - then for now, then in zip(_seconds(server), before, strict=True)]
    own, cpu, *each = (1000 * one / max(1, len(figures.answers)) for one in used)
    stages = _stages(Counts.read(server.url, door.model), counts)
    return Cell(door.name, frontends, round, figures, cpu, sum(each), own, max(each) / (sum(each) or 1), stages)


def _seconds(server: servers.Server) -> list[float]:
    """Of processor time: of this process, of the whole server, and of each of its fronts."""
    return [time.process_time(), server.cpu_seconds(), *server.cpu_seconds_each("service.frontend")]


def _stages(counts: Counts, before: Counts) -> dict[str, float]:
    stages = counts.stages(before) | {"channel": counts.channel(before)}
    return stages | {"outside": stages["total"] - sum(stages[one] for one in ENGINE)}


def _table(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """A line for each case; times: as many answers as with the first number of fronts in the same round."""
    yield ["frontends", "request", "answers/s", "times", *(f"{one} ms" for one in COLUMNS[1:-1]), "busiest"]
    for ones in _cases(cells):
        alone = [one for one in cells if one.door == ones[0].door and one.frontends == cells[0].frontends]
        times = [one.figures.rate / other.figures.rate for one, other in zip(ones, alone, strict=True)]
        rate, *others = (report.spread([one.value(column) for one in ones]) for column in COLUMNS)
        yield [str(ones[0].frontends), ones[0].door, rate, report.spread(times), *others]


def _stages_table(cells: Sequence[Cell]) -> Iterator[list[str]]:
    yield ["frontends", "request", *SHOWN]
    for ones in _cases(cells):
        yield [str(ones[0].frontends), ones[0].door, *(report.spread([one.value(stage) for one in ones]) for stage in SHOWN)]


def _cases(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The rounds of each number of fronts and kind of request."""
    found: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.frontends, cell.door), []).append(cell)
    return list(found.values())


def _record(cell: Cell, callers: int) -> dict[str, Any]:
    return {
        "request": cell.door,
        "model": QUESTIONS if cell.door == TEXT else SENSOR,
        "frontends": cell.frontends,
        "callers": callers,
        "round": cell.round,
        "answers/s": round(cell.figures.rate, 1),
        **{f"{name}_ms": round(value, 4) for name, value in report.milliseconds(cell.figures).items()},
        **{f"{name.lower()}_ms": round(cell.value(name), 4) for name in ("CPU", "frontend", "load")},
        "busiest": round(cell.busiest, 4),
        "stages_ms": {stage: round(value, 4) for stage, value in cell.stages.items()},
        "answers": len(cell.figures.answers),
        "failed": cell.figures.failed,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench_endpoints", description="Each door, by one front and by several."
    )
    parser.add_argument("--frontends", type=int, nargs="+", default=FRONTS, help="%(default)s unless given")
    parser.add_argument("--callers", type=int, default=32, help="at once, %(default)s unless given")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round, %(default)s unless given")
    parser.add_argument("--rounds", type=int, default=5, help="of each case, %(default)s unless given")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the JSON lines, results/ beside the code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
