"""Start the real proxies that `make programs PROGRAMS=proxies` installs: nginx, HAProxy and Envoy."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.serving import eventually

PROXIES = ("nginx", "haproxy", "envoy")


@contextmanager
def running(name: str, arguments: Sequence[str], port: int, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a proxy from the moment it accepts connections at a port of 127.0.0.1. It logs to a file in `scratch`."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is missing: `make programs PROGRAMS=proxies` installs it")
    file = scratch / f"{name}.log"
    with file.open("w") as log:
        process = subprocess.Popen([program, *arguments], stdout=log, stderr=log)
    try:
        eventually(lambda: process.poll() is not None or _accepts(port))
        assert process.poll() is None, file.read_text()
        yield process
    finally:
        process.terminate()
        process.wait(30)


def arguments(name: str, file: Path) -> list[str]:
    """Return the arguments with which a proxy runs in the foreground, on one core, with a configuration file."""
    if name == "envoy":
        return ["-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
    return ["-c", str(file)] if name == "nginx" else ["-db", "-f", str(file)]


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
