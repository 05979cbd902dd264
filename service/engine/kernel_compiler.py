"""Compiles the CPU kernels in the background of an engine that was started without them, for the next start.

`make install` and the build of the image compile them. A service that was installed otherwise starts with the slower backends,
so that its first start is not delayed.
"""

from __future__ import annotations

import subprocess
import sys
from threading import Thread

from kernels.cpu.cache import NOT_COMPILED, missing
from service.log import Log


def compile_in_background(log: Log) -> None:
    """Start to compile the CPU kernels in another process if they are not compiled yet."""
    reason = missing()
    if reason is None:
        return
    log.warning("cpu kernels not compiled", reason=reason, effect="models on the CPU are slower")
    if reason == NOT_COMPILED:
        Thread(target=_compile, args=(log,), name="kernel-compiler", daemon=True).start()


def _compile(log: Log) -> None:
    command = [sys.executable, "-m", "kernels.cpu", "--low-priority"]
    compiling = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if compiling.returncode or missing():
        log.error("cpu kernels not compiled", reason=compiling.stderr.strip()[-500:])
    else:
        log.info("cpu kernels compiled", effect="the next start of the service uses them")
