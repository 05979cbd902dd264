"""`python -m loadtest.bench_codec`: what it takes to read and to write the tensors of a request, without a door and without a model.

One sequence of 64 x 64 numbers as raw FP32: the tensor alone, and the whole of a body or message as binary REST and gRPC have it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from kernels.bench.goals.common import HEADING, Goal
from kernels.bench.report import device_name, slug
from kernels.bench.timing import Spread, repeated
from loadtest import report
from loadtest.oip_requests import INPUT, METHOD, behind_json, message
from service.frontend.oip import json, protobuf_codec
from service.frontend.oip.tensors import Tensor, decode, encode
from service.frontend.oip.types import InferResponse

SHAPE = (64, 64)
CALLS = 50
"""Made one after the other for each time that is taken: reading the clock twice is then a small part of it."""
GOAL = Goal(10, "us")
PACKAGES = ("numpy", "msgspec", "protobuf")


def main(arguments: Sequence[str] | None = None) -> int:
    said = _parser().parse_args(arguments)
    machine = device_name(torch.device("cpu"))
    found = {what: repeated(_once(call), said.seconds) for what, call in ways().items()}
    print(f"one sequence of {SHAPE[0]} x {SHAPE[1]} FP32 on {machine}: median (p10-p90) of a call\n")
    print("\n".join(report.table(_lines(found))) + "\n")
    where = report.where(machine, PACKAGES)
    records = [{"what": what, "shape": SHAPE, **asdict(one), "goal_us": GOAL.limit} | where for what, one in found.items()]
    report.write(said.out / f"codec-{slug(machine)}.jsonl", records)
    return 0


def ways() -> dict[str, Callable[[], Any]]:
    """Every way of reading or writing the sequence; each has been seen to give what it should."""
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    raw, tensor = values.tobytes(), Tensor(INPUT, "FP32", SHAPE, values)
    (body, header), sent = behind_json(values), message("made-up", values)
    answer = InferResponse("made-up", "1", "", {}, [tensor])
    found: dict[str, Callable[[], Any]] = {
        "tensor, decode": lambda: decode(INPUT, "FP32", SHAPE, raw),
        "tensor, encode": lambda: encode(tensor),
        "binary REST, a request": lambda: json.read(body, header, "made-up", ""),
        "binary REST, an answer": lambda: json.written(answer, lambda _: True),
        "gRPC, a request": lambda: protobuf_codec.request(METHOD.read(sent)),
        "gRPC, an answer": lambda: protobuf_codec.response(answer).SerializeToString(),
    }
    decoded, encoded, (asked, _), (written, end), read, serialised = (call() for call in found.values())
    assert all(np.array_equal(one.values, values) for one in (decoded, *asked.inputs, *read.inputs))
    assert all(one == raw for one in (encoded, written[end:], *METHOD.gives.FromString(serialised).raw_output_contents))
    return found


def _once(call: Callable[[], Any]) -> Callable[[], float]:
    """The seconds that a call takes."""

    def once() -> float:
        begun = perf_counter()
        for _ in range(CALLS):
            call()
        return (perf_counter() - begun) / CALLS

    return once


def _lines(found: Mapping[str, Spread]) -> list[Sequence[str]]:
    """Each beside its goal."""
    lines = [GOAL.line(what, one.median_us, f"({one.p10_us:.3g}-{one.p90_us:.3g})") for what, one in found.items()]
    return [HEADING, *lines]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench_codec", description="Tensors of a request, read and written."
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way, %(default)s unless given")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the JSON lines, results/ beside the code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
