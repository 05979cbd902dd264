"""Measurements as tables and as records, and the setting of a run."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kernels.bench.tables import aligned
from kernels.bench.timing import Spread
from kernels.bench.workload import WANT, Workload

PACKAGES = ("numpy", "onnxruntime", "sru", "cupy-cuda13x", "numba")


@dataclass(frozen=True, slots=True)
class Setting:
    """Device, date and package versions of a run. threads: on a CPU."""

    device: str
    date: str
    versions: dict[str, str]
    threads: int | None

    @classmethod
    def of(cls, device: torch.device) -> Setting:
        """Return the setting of a run that starts now."""
        threads = torch.get_num_threads() if device.type == "cpu" else None
        return cls(device_name(device), date.today().isoformat(), versions(device), threads)

    def file_name(self, family: str) -> str:
        """Return the name of a family's results, without an ending. It has the threads if there are several."""
        threads = f"-{self.threads}-threads" if self.threads and self.threads > 1 else ""
        return f"{family}-{slug(self.device)}{threads}"

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.device}{threads}, {self.date}, {', '.join(map(' '.join, self.versions.items()))}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One backend or baseline on one workload, with one kind of timing. error: the largest against the reference."""

    workload: Workload
    backend: str
    timing: str
    spread: Spread
    error: float

    def record(self, setting: Setting) -> dict[str, object]:
        work, environment = self.workload, {name: value for name, value in asdict(setting).items() if value is not None}
        return {
            "family": work.family,
            "workload": work.kind,
            "form": work.form,
            "want": WANT[work.kind],
            "backend": self.backend,
            "dtype": work.dtype,
            "rows": work.rows,
            "steps": max(work.row_lengths()),
            "tokens": sum(work.row_lengths()),
            "input": work.inputs,
            "hidden": work.hidden,
            "layers": work.layers,
            "directions": work.directions,
            "lengths": work.lengths,
            "timing": self.timing,
            **asdict(self.spread),
            "error": self.error,
            **environment,
        }


def table(measurements: Sequence[Measurement]) -> str:
    """Return a line for each workload and timing, a column for each backend: median (p10-p90) in microseconds, * the fastest."""
    names = list(dict.fromkeys(one.backend for one in measurements))
    by_workload: dict[tuple[Workload, str], dict[str, Spread]] = {}
    for one in measurements:
        by_workload.setdefault((one.workload, one.timing), {})[one.backend] = one.spread
    lines = [["workload", "timing", *names]]
    for (workload, timing), spreads in by_workload.items():
        fastest = min(spread.median_us for spread in spreads.values())
        lines.append([str(workload), timing, *(_cell(spreads.get(name), fastest) for name in names)])
    return aligned(lines)


def _cell(spread: Spread | None, fastest: float) -> str:
    if spread is None:
        return "-"
    return f"{'*' if spread.median_us == fastest else ' '}{spread}"


def versions(device: torch.device) -> dict[str, str]:
    installed = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call] # torch's own code has no types there
        installed |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    with suppress(OSError):  # only Linux has the file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def slug(name: str) -> str:
    """Return a short device name for files, without the manufacturer: h200, epyc-2core."""
    short = re.sub(r"nvidia|\bamd\b|intel|\d+-core processor|processor|\bcpu\b|\((r|tm)\)|@ *[\d.]+ghz", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r" cores?$", "core", short)).strip("-")
