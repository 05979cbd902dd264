"""`python -m kernels.bench FAMILY [--device cpu|cuda:0] [--quick] [--threads N] [--out DIR]`: times a kernel family, or all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from kernels.backend import FAMILIES
from kernels.bench import goals, report
from kernels.bench.baselines import PEERS
from kernels.bench.measure import Bench
from kernels.bench.shares import shares
from kernels.bench.workload import FORMS
from kernels.bench.workloads import workloads

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if anyone disagreed with the reference or broke."""
    asked = _parser().parse_args(arguments)
    device: torch.device = asked.device
    out: Path | None = asked.out or (None if asked.quick else RESULTS)
    setting = _prepared(device, asked.threads)
    families = FAMILIES if asked.family == "all" else (asked.family,)
    return max([_family(family, device, asked.quick, setting, out) for family in families])


def _family(family: str, device: torch.device, quick: bool, setting: report.Setting, out: Path | None) -> int:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    bench = Bench(device, PEERS[family], _budget_s(family, device, quick), say)
    findings = bench.measured(workloads(family, device.type, quick))
    rows = shares(findings.rows)
    print(f"\n{family} on {setting}; microseconds: median (p10-p90), * the fastest\n")
    print(report.table(rows))
    if extras := report.extras(rows):
        print(f"\n{extras}\n")
    for line in (*findings.refused, *findings.left_out, *(f"WRONG: {one}" for one in findings.wrong)):
        print(line)
    reached = goals.table(rows, [backend.name for backend in import_module(f"kernels.{family}").BACKENDS])
    if reached:
        print(f"\n{reached}\n")
    if out is not None:
        _write(out / f"{family}-{report.slug(setting.device)}", rows, reached, setting)
    return 1 if findings.wrong else 0


def _write(path: Path, rows: Sequence[report.Row], reached: str, setting: report.Setting) -> None:
    """`path` is that of the files without their endings."""
    report.write(rows, setting, path.with_name(f"{path.name}.jsonl"))
    print(f"written to {path}.jsonl")
    if reached:
        path.with_name(f"{path.name}-goals.txt").write_text(f"{setting}\n\n{reached}\n")
        print(f"written to {path}-goals.txt")


def _budget_s(family: str, device: torch.device, quick: bool) -> float:
    """Seconds for each figure: a family stays under two and a half minutes, and all together under one when it is to be quick."""
    if device.type == "cpu":
        return 0.04 if quick else 0.3
    if family == "conv":
        return 0.03 if quick else 0.06
    return 0.03 if family in FORMS else 0.05 if quick else 0.15


def _prepared(device: torch.device, threads: int) -> report.Setting:
    """float32 means float32: TF32 would be another arithmetic. cuDNN may search for its fastest convolution."""
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
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description="Agree first, then time.")
    parser.add_argument("family", choices=(*FAMILIES, "all"))
    parser.add_argument("--device", type=_device, default="cpu", help="cpu or cuda:N")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, less time; writes nothing unless --out is given")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--out", type=Path, help="folder of what is written; results/ beside the code unless --quick")
    return parser


if __name__ == "__main__":
    sys.exit(main())
