"""`python -m kernels.cpu [--all] [--low-priority]`: compile the CPU kernels, so that no request waits for it. Returns at once
if that is done."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from kernels.cpu.cache import NOT_COMPILED, missing
from kernels.cpu.target import TARGET, compilable_targets

NICENESS = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu", description="Compile the CPU kernels.")
    parser.add_argument("--all", action="store_true", help="for all processors of this architecture")
    parser.add_argument("--low-priority", action="store_true", help="let other processes go first")
    options = parser.parse_args()
    if options.low_priority:
        os.nice(NICENESS)
    if options.all:
        commands = {target.name: [sys.executable, "-m", "kernels.cpu"] for target in compilable_targets()}
        return max(subprocess.run(command, env=os.environ | {TARGET: name}).returncode for name, command in commands.items())
    if missing() == NOT_COMPILED:
        from kernels.cpu.compiled import compile_all

        compile_all()
    if reason := missing():
        print(f"the CPU kernels are not used: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
