"""What was found out: one record for each row, as a table for the eye and as JSON lines for everything that is computed from it."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kernels.bench.timing import Spread
from kernels.bench.workloads import WANT, Workload

PACKAGES = ("numpy", "onnxruntime", "sru", "cupy-cuda13x", "numba")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and when a run takes place; threads: on a CPU."""

    device: str
    date: str
    versions: dict[str, str]
    threads: int | None

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.device}{threads}, {self.date}, {', '.join(f'{name} {one}' for name, one in self.versions.items())}"


@dataclass(frozen=True, slots=True)
class Row:
    """One backend or peer on one workload, timed in one way; agrees: its largest error against the reference."""

    workload: Workload
    backend: str
    timing: str
    spread: Spread
    agrees: float

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
            "layers": 1,
            "directions": 1,
            "lengths": work.lengths,
            "timing": self.timing,
            **asdict(self.spread),
            "agrees": self.agrees,
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
