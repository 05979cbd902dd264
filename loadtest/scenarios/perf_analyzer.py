"""Run Triton's load generator on this service, with questions and with streamed sequences.

The generator reads the models from the Open Inference Protocol and requests all outputs of a model. `make perf-analyzer` installs it.
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
from pathlib import Path
from typing import Any, NamedTuple

from loadtest import discovery, report, servers
from loadtest.discovery import CannotMeasure
from loadtest.traffic import Traffic
from service.client_access import ClientAccess

BINARY = servers.ROOT / ".venv-perf" / "bin" / "perf_analyzer"
LIBRARIES = "lib/python*/site-packages/nvidia/cuda_runtime/lib"
"""The program is linked against the CUDA runtime, which it needs only for shared memory."""
SUMMARY = "Triton's load generator on every protocol"
QUESTIONS, SENSOR = "question-type", "sensor-forecast"
TEXTS, SEQUENCES, CHUNKS, STEPS = 200, 50, 4, 16
"""Distinct questions; sequences, chunks of a sequence, and rows of a chunk."""
WINDOWS = ("--measurement-interval", "2000", "--stability-percentage", "25")
"""It measures windows of 2 s until three in a row differ by at most 25 %, which a shared machine can reach."""
TIMEOUT_SECONDS = 120
REST, GRPC, STREAM = "REST", "gRPC", "gRPC stream"
FLAGS = {REST: ("-i", "http"), GRPC: ("-i", "grpc"), STREAM: ("-i", "grpc", "--streaming")}
FAILED = "failed"
COLUMNS = {
    "answers/s": "Inferences/Second",
    **{f"{name} us": f"{name} latency" for name in ("p50", "p90", "p99")},
    "queue us": "Server Queue",
    "compute us": "Server Compute Infer",
}
"""Our column, and the column of perf_analyzer."""


class Case(NamedTuple):
    """One run: `callers` concurrent requests to a model over a protocol in FLAGS."""

    protocol: str
    address: str
    model: str
    data: Path
    callers: int
    key: str = ""

    @property
    def name(self) -> str:
        return f"{self.protocol.replace(' ', '-').lower()}-{self.model}-{self.callers}"

    def command(self, out: Path) -> list[str]:
        # perf_analyzer reads headers, for gRPC too, from its command line only.
        key = ("-H", f"authorization:Bearer {self.key}") if self.key else ()
        load = ("-m", self.model, "-u", self.address, *FLAGS[self.protocol], "--input-data", str(self.data))
        return [str(BINARY), *load, "--concurrency-range", str(self.callers), *WINDOWS, *key, "-f", str(out)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="a running server, instead of a new one; perf_analyzer shows its key in the list of processes"
    )
    discovery.add_access_options(parser)
    parser.add_argument("--grpc", help="host:port of its gRPC endpoint; without it, gRPC is skipped")
    parser.add_argument("--callers", type="count", nargs="+", default=(1, 8, 32), help="levels of concurrent requests")


def run(options: argparse.Namespace) -> int:
    """Print a line for each case. Returns 0, or 1 when a case could not be measured."""
    if not BINARY.is_file():
        raise CannotMeasure(f"{BINARY} is missing: install it with `make perf-analyzer`")
    if options.url and not options.url.startswith("http://"):
        raise CannotMeasure(f"perf-analyzer measures without TLS, and --url is {options.url}: name an address with http://")
    lines = [["protocol", "model", "callers", *COLUMNS]]
    with servers.named_or_new(options.url, options.grpc, options.out / "server.log") as (url, grpc):
        for case in cases(options.out, url, grpc, options.callers, discovery.access_of(options)):
            record = measure(case, options.out)
            figures = [f"{float(record[column]):.0f}" for column in COLUMNS.values()] if record else [FAILED] * len(COLUMNS)
            lines.append([case.protocol, case.model, str(case.callers), *figures])
            print(f"  {case.name}  {figures[0]}", file=sys.stderr, flush=True)
    print(f"\n{report.table(lines)}\n")
    return 1 if any(FAILED in line for line in lines) else 0


def cases(
    out: Path, url: str, grpc: str | None, callers: Sequence[int], access: ClientAccess = discovery.NO_ACCESS
) -> Iterator[Case]:
    """Write the inputs to the folder `out`, and return the runs at each level of concurrent requests."""
    address = url.partition("://")[2]
    questions, sequences = out / "questions.json", out / "sequences.json"
    questions.write_text(json.dumps({"data": _questions(discovery.find(url, QUESTIONS, access))}))
    sequences.write_text(json.dumps({"data": _sequences(discovery.find(url, SENSOR, access))}))
    loads = [(REST, address, QUESTIONS, questions), (REST, address, SENSOR, sequences)]
    if grpc is not None:
        loads += [(GRPC, grpc, QUESTIONS, questions), (GRPC, grpc, SENSOR, sequences), (STREAM, grpc, SENSOR, sequences)]
    return (Case(*load, count, access.key) for count, load in itertools.product(callers, loads))


def _questions(model: dict[str, Any]) -> list[Any]:
    """Return texts, of numbers when the words of the model are unknown."""
    traffic = discovery.inputs(servers.MODELS, model)
    inputs: list[Any] = [traffic.input() for _ in range(TEXTS)]
    texts = [each if isinstance(each, str) else " ".join(map(str, each)) for each in inputs]
    return [{"text": {"content": [text], "shape": [1]}} for text in texts]


def _sequences(model: dict[str, Any]) -> list[Any]:
    traffic = Traffic(model)

    def chunk() -> dict[str, Any]:
        rows: Any = traffic.input(STEPS)
        return {"inputs": {"content": list(itertools.chain.from_iterable(rows)), "shape": [STEPS, len(rows[0])]}}

    return [[chunk() for _ in range(CHUNKS)] for _ in range(SEQUENCES)]


def measure(case: Case, out: Path, *flags: str) -> dict[str, str] | None:
    """Run perf_analyzer. Returns the line of its CSV file, or None after printing its output when it fails.

    flags: more flags of perf_analyzer.
    """
    figures = out / f"{case.name}.csv"
    figures.unlink(missing_ok=True)
    folders = map(str, BINARY.parent.parent.glob(LIBRARIES))
    environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (*folders, os.environ.get("LD_LIBRARY_PATH"))))}
    command = ["timeout", str(TIMEOUT_SECONDS), *case.command(figures), *flags]
    completed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if completed.returncode or not figures.is_file():
        print(f"{case.name}, status {completed.returncode}:\n{completed.stdout}", file=sys.stderr)
        return None
    with figures.open(newline="") as lines:
        return next(csv.DictReader(lines))
