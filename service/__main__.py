"""`python -m service` and `seqserve`: the command line."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Run the command line and return its exit status."""
    # Otherwise a later file would have the number of a closed standard stream, and child processes would not inherit it.
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    # The first process of a container ignores signals without a handler, and the imports below take a second.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    from service import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
