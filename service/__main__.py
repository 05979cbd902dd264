"""`python -m service` and `seqserve`: the command line."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """The command's exit status."""
    # The first process of a container is deaf to signals that it does not handle, and the imports below take a moment.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    from service import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
