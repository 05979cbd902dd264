"""Measures the latency and the throughput of a served model with `seqserve bench`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from training import records
from training.records import Record
from training.service import Service

CALLERS = (1, 64)
"""Callers of the two loads: one caller measures the latency, many measure the throughput."""


def measure(service: Service, models: Path, model: str, device: str, seconds: float) -> list[Record]:
    """Return the latency and the throughput of a model under each load."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "levels.jsonl"
        command = [sys.executable, "-m", "service", "bench", "--url", service.url, "--models", str(models), "--model", model]
        levels = ["--callers", ",".join(map(str, CALLERS)), "--seconds", str(seconds), "--json", str(file)]
        subprocess.run([*command, *levels], check=True, stdout=subprocess.DEVNULL)
        loads = records.read(file)
    figures = {"callers": "callers", "p50_ms": "p50_ms", "p99_ms": "p99_ms", "texts_per_second": "answers_per_second"}
    return [
        {"kind": "speed", "device": device, **gpu(device), **{name: load[source] for name, source in figures.items()}}
        for load in loads
    ]


def gpu(device: str | torch.device) -> Record:
    """Return the name of a GPU as part of a record: nothing for the CPU."""
    return {} if torch.device(device).type == "cpu" else {"gpu": torch.cuda.get_device_name(device)}
