"""`python -m kernels.bench FAMILY [--device cpu|cuda:0] [--quick] [--threads N] [--out DIR]`: time a kernel family, or all.

The family `ladder` is an LSTM with one optimisation after the other, `latency` is one step of one stream, and `voice` is the layers of a
voice detector.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from kernels.bench import goals, report, voice
from kernels.bench.baselines import BASELINES
from kernels.bench.kept import kept
from kernels.bench.ladder import command as ladder
from kernels.bench.latency import command as latency
from kernels.bench.measure import Bench
from kernels.bench.tables import RESULTS, write_results
from kernels.bench.workload import FORMS
from kernels.bench.workloads import FAMILIES, workloads

ON_GPU = {"latency": latency.run, "voice": voice.run}
OTHERS = {"ladder": ladder.run, **ON_GPU}
"""Benchmarks that are not a family of workloads, and those of them that need a GPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a backend or a baseline disagreed with the reference or failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    device: torch.device = options.device
    if options.family in ON_GPU and device.type != "cuda":
        parser.error(f"{options.family} needs a GPU: name it with --device cuda:0")
    out: Path | None = options.out or (None if options.quick or options.threads > 1 else RESULTS)
    setting = _prepare(device, options.threads)
    if options.family in OTHERS:
        return OTHERS[options.family](device, options.quick, setting, out, _progress)
    families = FAMILIES if options.family == "all" else (options.family,)
    return max([_family(family, device, options.quick, setting, out) for family in families])


def _family(family: str, device: torch.device, quick: bool, setting: report.Setting, out: Path | None) -> int:
    bench = Bench(device, BASELINES[family], _budget_s(family, device, quick), _progress)
    findings = bench.measured(workloads(family, device.type, quick))
    measurements = findings.measurements
    print(f"\n{family} on {setting}; microseconds: median (p10-p90), * the fastest\n")
    print(report.table(measurements))
    for line in (*findings.refused, *findings.skipped, *(f"WRONG: {error}" for error in findings.wrong)):
        print(line)
    backends = [backend.name for backend in import_module(f"kernels.{family}").BACKENDS]
    judged = goals.table(goals.goals_for(device.type, setting.threads), measurements, backends)
    if judged:
        print(f"\n{judged}\n")
    written = kept(measurements, backends, device.type, setting.threads) if out == RESULTS else measurements
    text = f"{setting}\n\n{judged}\n" if judged else ""
    write_results(out, setting.file_name(family), [one.record(setting) for one in written], text)
    return 1 if findings.wrong else 0


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _budget_s(family: str, device: torch.device, quick: bool) -> float:
    """Return the seconds for each figure: a family takes at most two and a half minutes; a quick run of all families takes one."""
    if device.type == "cpu":
        return 0.04 if quick else 0.3
    if family == "conv":
        return 0.03 if quick else 0.06
    return 0.03 if family in FORMS else 0.05 if quick else 0.08


def _prepare(device: torch.device, threads: int) -> report.Setting:
    """Set up torch: no TF32, so that float32 is float32, and cuDNN searches for its fastest convolution."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(threads)
    return report.Setting.of(device)


def _device(name: str) -> torch.device:
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled for CUDA
        raise argparse.ArgumentTypeError(f"{name}: {str(error).splitlines()[0]}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench", description="Check every backend and baseline of a kernel family, then time them."
    )
    parser.add_argument("family", choices=(*FAMILIES, "all", *OTHERS), help="all: every family of layers")
    parser.add_argument("--device", type=_device, default="cpu", help="cpu or cuda:N (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and less time; writes nothing without --out")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads on a CPU; several write nothing without --out (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="folder for all results (default: kernels/bench/results, for some)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
