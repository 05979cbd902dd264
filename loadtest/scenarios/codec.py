"""Time to read and write the tensors of a request, without an endpoint and without a model.

One sequence of 64 x 64 numbers as raw FP32: the tensor alone, and the whole body or message of binary REST and gRPC.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np
import torch

from kernels.bench.goals.limit import HEADING, Limit
from kernels.bench.report import device_name, slug
from kernels.bench.tables import write
from kernels.bench.timing import Spread, repeated
from loadtest import report
from loadtest.oip_requests import INPUT, METHOD, behind_json, message
from service.frontend.oip import json, protobuf
from service.frontend.oip.tensors import Tensor, decode, encode
from service.frontend.oip.types import InferResponse

SUMMARY = "reading and writing the tensors of a request"
SHAPE = (64, 64)
CALLS = 50
"""Calls in each timed repetition: the cost of reading the clock becomes negligible."""
LIMIT = Limit(10, "us")
PACKAGES = ("numpy", "msgspec", "protobuf")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each operation")


def run(options: argparse.Namespace) -> int:
    machine = device_name(torch.device("cpu"))
    spreads = {name: repeated(_seconds_per_call(call), options.seconds) for name, call in operations().items()}
    print(f"one sequence of {SHAPE[0]} x {SHAPE[1]} FP32 on {machine}: median (p10-p90) of a call\n")
    print(report.table(table(spreads)) + "\n")
    environment = report.environment(machine, PACKAGES)
    records = [
        {"what": name, "shape": SHAPE, **asdict(spread), "goal_us": LIMIT.value} | environment
        for name, spread in spreads.items()
    ]
    write(options.out / f"codec-{slug(machine)}.jsonl", records)
    return 0


def operations() -> dict[str, Callable[[], Any]]:
    """Return every operation by name. Each has been checked once."""
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    raw, tensor = values.tobytes(), Tensor(INPUT, "FP32", SHAPE, values)
    (body, header), sent = behind_json(values), message("synthetic", values)
    response = InferResponse("synthetic", "1", "", {}, [tensor])
    calls: dict[str, Callable[[], Any]] = {
        "tensor, decode": lambda: decode(INPUT, "FP32", SHAPE, raw),
        "tensor, encode": lambda: encode(tensor),
        "binary REST, a request": lambda: json.parse_request(body, header, "synthetic", ""),
        "binary REST, an answer": lambda: json.encode_response(response, lambda _: True),
        "gRPC, a request": lambda: protobuf.infer_request(METHOD.parse(sent)),
        "gRPC, an answer": lambda: protobuf.infer_response(response).SerializeToString(),
    }
    decoded, encoded, (request, _), (written, end), read, serialised = (call() for call in calls.values())
    assert all(np.array_equal(array.values, values) for array in (decoded, *request.inputs, *read.inputs))
    assert all(
        data == raw for data in (encoded, written[end:], *METHOD.response_type.FromString(serialised).raw_output_contents)
    )
    return calls


def _seconds_per_call(call: Callable[[], Any]) -> Callable[[], float]:
    def timed() -> float:
        start = perf_counter()
        for _ in range(CALLS):
            call()
        return (perf_counter() - start) / CALLS

    return timed


def table(spreads: Mapping[str, Spread]) -> list[Sequence[str]]:
    """Return one line for each operation, with the limit and whether it is met."""
    lines = [LIMIT.line(name, one.median_us, f"({one.p10_us:.3g}-{one.p90_us:.3g})") for name, one in spreads.items()]
    return [HEADING, *lines]
