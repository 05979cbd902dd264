"""`python -m service` and `seqserve`: the command line."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line and return its exit status."""
    # The first process of a container ignores signals without a handler, and the imports below take a second.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    from service import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
