"""`python -m loadtest.perf_analyzer`: Triton's own load generator on this service, with questions, and sequences of a streaming model.

It knows of a service what the Open Inference Protocol tells it, and wants of each model all outputs that there are. `make perf-analyzer`
installs it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import discovery, report, servers
from loadtest.bench import described
from loadtest.discovery import NoServer
from loadtest.traffic import Traffic

BINARY = servers.ROOT / ".venv-perf" / "bin" / "perf_analyzer"
LIBRARIES = "lib/python*/site-packages/nvidia/cuda_runtime/lib"
"""It is linked against CUDA's runtime, which it uses for shared memory alone."""
QUESTIONS, SENSOR = "question-type", "sensor-forecast"
TEXTS, SEQUENCES, CHUNKS, STEPS = 200, 50, 4, 16
"""Different questions, and sequences of so many chunks of so many rows."""
WINDOW_MS, STABLE_PERCENT = 2000, 25
"""It measures windows of this length until three in a row differ by no more than this: a shared machine is not steadier."""
PATIENCE_SECONDS = 120
REST, GRPC, STREAM = "REST", "gRPC", "gRPC stream"
FLAGS = {REST: ("-i", "http"), GRPC: ("-i", "grpc"), STREAM: ("-i", "grpc", "--streaming")}
COLUMNS = {
    "answers/s": "Inferences/Second",
    **{f"{one} us": f"{one} latency" for one in report.QUANTILES},
    "queue us": "Server Queue",
    "compute us": "Server Compute Infer",
}
"""Ours, and its own."""


@dataclass(frozen=True, slots=True)
class Case:
    """What it is asked to do: so many callers of a model, by one of FLAGS, on the server at this address."""

    way: str
    address: str
    model: str
    data: Path
    callers: int

    @property
    def name(self) -> str:
        return f"{self.way.replace(' ', '-').lower()}-{self.model}-{self.callers}"

    def command(self, binary: Path, out: Path) -> list[str]:
        measured = ("--measurement-interval", str(WINDOW_MS), "--stability-percentage", str(STABLE_PERCENT))
        asked = ("-m", self.model, "-u", self.address, *FLAGS[self.way], "--input-data", str(self.data))
        return [str(binary), *asked, "--concurrency-range", str(self.callers), *measured, "-f", str(out)]


def main(arguments: Sequence[str] | None = None) -> int:
    """0, 1 when it could not measure a case, 2 when there was nobody to ask or nobody who asks."""
    said = _parser().parse_args(arguments)
    if not said.binary.is_file():
        print(f"perf_analyzer: there is no {said.binary}: `make perf-analyzer` installs it", file=sys.stderr)
        return 2
    said.out.mkdir(parents=True, exist_ok=True)
    try:
        with _server(said.url, said.grpc, said.out / "server.log") as (url, grpc):
            return _run(said, url, grpc)
    except (NoServer, RuntimeError) as fault:
        print(f"perf_analyzer: {fault}", file=sys.stderr)
        return 2


def _run(said: argparse.Namespace, url: str, grpc: str | None) -> int:
    if grpc is None:
        print("gRPC is left out: name its address with --grpc", file=sys.stderr)
    rows, failed = [["way", "model", "callers", *COLUMNS]], 0
    for case in _cases(said.out, url, grpc, said.callers):
        found = _measured(case, said.binary, said.out)
        failed += found is None
        figures = ["failed", *["-"] * (len(COLUMNS) - 1)] if found is None else _figures(found)
        rows.append([case.way, case.model, str(case.callers), *figures])
        print(f"  {case.name}  {figures[0]}", file=sys.stderr, flush=True)
    print("\n".join(["", *report.table(rows), ""]))
    print(f"{said.out}: what it said of each case, and its own figures as CSV")
    return 1 if failed else 0


def _cases(out: Path, url: str, grpc: str | None, callers: Sequence[int]) -> Iterator[Case]:
    address = url.partition("://")[2]
    questions, sequences = _questions(url, out / "questions.json"), _sequences(url, out / "sequences.json")
    for count in callers:
        yield Case(REST, address, QUESTIONS, questions, count)
        yield Case(REST, address, SENSOR, sequences, count)
        if grpc is not None:
            yield Case(GRPC, grpc, QUESTIONS, questions, count)
            yield Case(GRPC, grpc, SENSOR, sequences, count)
            yield Case(STREAM, grpc, SENSOR, sequences, count)


def _questions(url: str, file: Path) -> Path:
    model = described(url, QUESTIONS)
    traffic = discovery.inputs(servers.MODELS, model)
    return _write(file, [_question(traffic.input()) for _ in range(TEXTS)])


def _question(value: Any) -> dict[str, Any]:
    """A text, or token ids where the model's words are not known here."""
    if isinstance(value, str):
        return {"text": {"content": [value], "shape": [1]}}
    return {"ids": {"content": value, "shape": [len(value)]}}


def _sequences(url: str, file: Path) -> Path:
    traffic = Traffic(described(url, SENSOR))

    def chunk() -> dict[str, Any]:
        rows: Any = traffic.input(STEPS)
        return {"inputs": {"content": list(itertools.chain.from_iterable(rows)), "shape": [STEPS, len(rows[0])]}}

    return _write(file, [[chunk() for _ in range(CHUNKS)] for _ in range(SEQUENCES)])


def _write(file: Path, data: list[Any]) -> Path:
    file.write_text(json.dumps({"data": data}))
    return file


def _measured(case: Case, binary: Path, out: Path) -> dict[str, str] | None:
    """The line of its CSV; None when it gives up, and then what it says is shown."""
    figures = out / f"{case.name}.csv"
    figures.unlink(missing_ok=True)
    folders = map(str, binary.parent.parent.glob(LIBRARIES))
    environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (*folders, os.environ.get("LD_LIBRARY_PATH"))))}
    try:
        ended = subprocess.run(
            case.command(binary, figures), env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        printed, status = ended.stdout + ended.stderr, ended.returncode
    except subprocess.TimeoutExpired:
        printed, status = f"it did not end within {PATIENCE_SECONDS} s\n", 1
    (out / f"{case.name}.txt").write_text(printed)
    if status or not figures.is_file():
        print(f"{case.name}, status {status}:\n{printed}", file=sys.stderr)
        return None
    with figures.open(newline="") as lines:
        return next(csv.DictReader(lines))


def _figures(found: dict[str, str]) -> list[str]:
    return [f"{float(found[theirs]):.0f}" for theirs in COLUMNS.values()]


@contextmanager
def _server(url: str | None, grpc: str | None, log: Path) -> Iterator[tuple[str, str | None]]:
    """Where the server is, by HTTP and by gRPC: one of its own unless it is named."""
    if url:
        yield url.rstrip("/"), grpc
        return
    with servers.running(*servers.seqserve(), log=log) as server:
        yield server.url, server.grpc


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.perf_analyzer", description="Triton's load generator, on this service."
    )
    parser.add_argument("--url", help="a running server; one is started unless given")
    parser.add_argument("--grpc", help="host:port of its gRPC, which is left out unless given")
    parser.add_argument("--callers", type=int, nargs="+", default=(1, 8, 32), help="levels, %(default)s unless given")
    parser.add_argument("--binary", type=Path, default=BINARY, help="the program, %(default)s unless given")
    parser.add_argument("--out", type=Path, default=Path("build/perf-analyzer"), help="folder of what it writes, %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
