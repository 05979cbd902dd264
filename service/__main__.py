"""`python -m service` and `seqserve`: the command line."""

from __future__ import annotations

import errno
import os
import signal
import sys


def main() -> int | str:
    """Run the command line and return its exit status, or the error that prevented its output."""
    # Otherwise a later file would have the number of a closed standard stream, and child processes would not inherit it.
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    # The first process of a container ignores signals without a handler, and the imports below take a second.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    from service import cli

    try:
        try:
            return cli.main()
        finally:
            print(end="", flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter writes what is left when it ends
        return 128 + signal.SIGPIPE if error.errno == errno.EPIPE else f"seqserve: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main())
