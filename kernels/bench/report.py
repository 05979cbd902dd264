"""Measurements as tables and as records, and the setting of a run."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version

import torch

from kernels.bench.peaks import Peaks
from kernels.bench.tables import aligned
from kernels.bench.timing import Spread
from kernels.bench.workload import WANT, Workload
from kernels.device_name import device_name as device_name  # the scenarios of the load tests name machines as reports do

PACKAGES = ("numpy", "onnxruntime", "sru", "cupy-cuda13x", "numba")

FMA_SHARE, READ_SHARE, PRODUCT_SHARE = "share_of_peak_fma", "share_of_memory_rate", "share_of_the_product_rate"
BOUNDS = {FMA_SHARE: "peak FMA", READ_SHARE: "memory", PRODUCT_SHARE: "product rate"}
"""Additional values of measurements, by what bounds their workload: the share of the peak rate of multiply-adds, or of the rate at which
weights are read from caches and memory, on a CPU; the share of the rate of a large product on a GPU."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Device, date and package versions of a run. threads: on a CPU; peaks: on a CPU, if they were measured."""

    device: str
    date: str
    versions: dict[str, str]
    threads: int | None
    peaks: Peaks | None = None

    @classmethod
    def of(cls, device: torch.device, peaks: Peaks | None = None) -> Setting:
        """Return the setting of a run that starts now."""
        threads = torch.get_num_threads() if device.type == "cpu" else None
        return cls(device_name(device), date.today().isoformat(), versions(device), threads, peaks)

    def file_name(self, family: str) -> str:
        """Return the name of a family's results, without an ending. It has the threads if there are several."""
        threads = f"-{self.threads}-threads" if self.threads and self.threads > 1 else ""
        return f"{family}-{slug(self.device)}{threads}"

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.device}{threads}, {self.date}, {', '.join(map(' '.join, self.versions.items()))}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One backend or baseline on one workload, with one kind of timing. error: largest error against the reference; shares: by name of
    BOUNDS."""

    workload: Workload
    backend: str
    timing: str
    spread: Spread
    error: float
    shares: Mapping[str, float] = field(default_factory=dict)

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
            **self.shares,
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


def shares(measurements: Sequence[Measurement]) -> str:
    """Return a line for each workload, with its bound and the share of each backend; empty without shares."""
    cells: dict[tuple[Workload, str], dict[str, str]] = {}
    for one in sorted(measurements, key=lambda one: one.timing == "kernel"):  # kernel times come last and replace others
        for name, share in one.shares.items():
            cells.setdefault((one.workload, BOUNDS[name]), {})[one.backend] = f"{share:.0%}".replace("%", " %")
    backends = list(dict.fromkeys(backend for by_backend in cells.values() for backend in by_backend))
    lines = [["workload", "share of", *backends]]
    for (workload, bound), by_backend in cells.items():
        lines.append([str(workload), bound, *(by_backend.get(backend, "-") for backend in backends)])
    return aligned(lines) if cells else ""


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


def slug(name: str) -> str:
    """Return a short device name for files, without the manufacturer: h200, epyc-2core."""
    short = re.sub(r"nvidia|\bamd\b|intel|\d+-core processor|processor|\bcpu\b|\((r|tm)\)|@ *[\d.]+ghz", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r" cores?$", "core", short)).strip("-")
