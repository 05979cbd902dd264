"""`python -m tests.long.fuzz.wire --requests 2000000`: fuzz a new service over its sockets, and print what came back and what is wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.long.fuzz.wire.run import Account, fuzzed, served


def main() -> int:
    """Return the exit status: 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.long.fuzz.wire", description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()

    def show(account: Account) -> None:
        print(f"{time.monotonic() - began:.0f} s: {account}", flush=True)
        for fault in account.faults:
            print(f"  {fault}", flush=True)

    with tempfile.TemporaryDirectory(prefix="seqserve-fuzz-") as folder:
        root = served(Path(folder) / "models")
        with fuzzed(root, Path(folder), seed=options.seed) as fuzzer:
            fuzzer.run(options.requests, show)
    show(fuzzer.account)
    print(f"findings: {dict(fuzzer.account.findings) or 'none'}")
    return int(bool(fuzzer.account.findings))


if __name__ == "__main__":
    sys.exit(main())
