"""What was found out: one record for each row, as a table for the eye and as JSON lines for everything that is computed from it."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kernels.bench.timing import Spread
from kernels.bench.workload import WANT, Workload

PACKAGES = ("numpy", "onnxruntime", "sru", "cupy-cuda13x", "numba")

MEMORY, FACTORS, SHARE = "memory_growth", "error_of_the_factors", "share_of_the_product_rate"
EXTRA = (MEMORY, FACTORS, SHARE)
"""What is known of some rows besides their time: bytes of what a strategy lays out anew over those of the input; how far factorised
filters are from the true ones, relative to these; multiplications by the second over those of a large product on the same device."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and when a run takes place; threads: on a CPU."""

    device: str
    date: str
    versions: dict[str, str]
    threads: int | None

    @classmethod
    def of(cls, device: torch.device) -> Setting:
        """Here and today, with as many threads as torch has."""
        threads = torch.get_num_threads() if device.type == "cpu" else None
        return cls(device_name(device), date.today().isoformat(), versions(device), threads)

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.device}{threads}, {self.date}, {', '.join(f'{name} {one}' for name, one in self.versions.items())}"


@dataclass(frozen=True, slots=True)
class Row:
    """One backend or peer on one workload, timed in one way; agrees: its largest error against the reference; extra: what else is known
    of it, by names of EXTRA."""

    workload: Workload
    backend: str
    timing: str
    spread: Spread
    agrees: float
    extra: Mapping[str, float] = field(default_factory=dict)

    def record(self, setting: Setting) -> dict[str, object]:
        work, where = self.workload, asdict(setting)
        if setting.threads is None:
            del where["threads"]
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
            "directions": 1,
            "lengths": work.lengths,
            "timing": self.timing,
            **asdict(self.spread),
            "agrees": self.agrees,
            **self.extra,
            **where,
        }


def write(rows: Iterable[Row], setting: Setting, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row.record(setting))}\n" for row in rows))


def table(rows: Sequence[Row]) -> str:
    """A line for each workload and timing, a column for each backend: median (p10-p90) in microseconds, * the fastest."""
    names = list(dict.fromkeys(row.backend for row in rows))
    found: dict[tuple[Workload, str], dict[str, Spread]] = {}
    for row in rows:
        found.setdefault((row.workload, row.timing), {})[row.backend] = row.spread
    lines = [["workload", "timing", *names]]
    for (workload, timing), spreads in found.items():
        fastest = min(one.median_us for one in spreads.values())
        lines.append([str(workload), timing, *(_cell(spreads.get(name), fastest) for name in names)])
    return aligned(lines)


def extras(rows: Sequence[Row]) -> str:
    """A table for each name of EXTRA that some row has: a line for each workload, a column for each backend. What depends on the time
    is that of `kernel` times where there are some."""
    return "\n\n".join(aligned(lines) for name in EXTRA if len(lines := _extra(rows, name)) > 1)


def _extra(rows: Sequence[Row], name: str) -> list[list[str]]:
    having = sorted((row for row in rows if name in row.extra), key=lambda row: row.timing == "kernel")
    found = {(row.workload, row.backend): f"{row.extra[name]:.3g}" for row in having}  # a kernel's comes last, and stays
    names = list(dict.fromkeys(row.backend for row in rows if name in row.extra))
    workloads = dict.fromkeys(row.workload for row in rows if name in row.extra)
    heading = [name.replace("_", " "), *names]
    return [heading, *([str(one), *(found.get((one, backend), "-") for backend in names)] for one in workloads)]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(found: Spread | None, fastest: float) -> str:
    if found is None:
        return "-"
    low, median, high = (
        f"{value:.3g}" if value < 999.5 else f"{value:.0f}" for value in (found.p10_us, found.median_us, found.p90_us)
    )
    return f"{'*' if found.median_us == fastest else ' '}{median} ({low}-{high})"


def versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call] # torch's own code has no types there
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {os.cpu_count()} cores"


def slug(name: str) -> str:
    """A device's name as part of a file name, without its maker: h200, epyc-2core."""
    short = re.sub(r"nvidia|\bamd\b|intel|\d+-core processor|processor|\bcpu\b|\((r|tm)\)|@ *[\d.]+ghz", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r" cores?$", "core", short)).strip("-")


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
