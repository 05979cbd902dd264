"""Send the test part of a set with an output per step to a running service and print the quality of each model for it.

Requires the standard library only: it is an ordinary HTTP client. A language model gets every line through a session, one byte in a chunk.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.error
from pathlib import Path

from training.service import Service
from training.step_sets import MissingSet, optimum, read_part
from training.step_tasks import TASKS


def main(line: list[str] | None = None) -> int:
    """Return 0 if the table was printed, 1 if the service does not answer, 2 if the set is missing."""
    flags = arguments(line)
    task = TASKS[flags.kind]
    try:
        test = read_part(flags.data, flags.set, flags.kind, "test")[: flags.limit]
    except MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    best = {} if flags.limit else optimum(flags.data, flags.set, flags.kind)
    try:
        service = Service(flags.url, flags.key_file, flags.ca)
        prefix = f"{flags.set}-{flags.kind}-"
        names = [flags.model] if flags.model else [each["name"] for each in service.models() if each["name"].startswith(prefix)]
        rows = []
        for name in names:
            start = time.monotonic()
            rows.append((name, task.quality(test, task.ask(service, name, test)), time.monotonic() - start))
    except urllib.error.URLError as error:
        print(f"no answer from {flags.url} ({error}): start the service, or pass its address with --url", file=sys.stderr)
        return 1
    figures = list(rows[0][1]) if rows else [task.figure]
    print(f"| model, {len(test)} examples | {' | '.join(figures)} | s |\n|---|{'---|' * len(figures)}---|")
    for name, quality, seconds in rows:
        print(f"| {name} | {' | '.join(f'{quality[figure]:.2f}' for figure in figures)} | {seconds:.1f} |")
    if best:
        print(f"| best possible | {' | '.join(f'{best[figure]:.2f}' for figure in figures)} | |")
    return 0


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=tuple(TASKS), help="kind of set")
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--set", default="hidden", help="name of the set (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="number of examples (default: the whole test part)")
    parser.add_argument("--model", help="name of the model (default: every model whose name begins with the set and the kind)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    parser.add_argument("--key-file", type=Path, help="file with the key to send (default: $SEQSERVE_CLIENT_KEY is the key)")
    parser.add_argument("--ca", type=Path, help="authority of the service's certificate (default: the system's authorities)")
    flags = parser.parse_args(line)
    flags.data = Path(flags.data) if flags.data else None
    return flags


if __name__ == "__main__":
    sys.exit(main())
