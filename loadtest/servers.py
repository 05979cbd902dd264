"""Servers on this machine, started for a comparison and ended after it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
START_SECONDS = 60.0
STOP_SECONDS = 60.0


class Server:
    """One running server and the processes under it. grpc: host and port, where the plain handler has nothing."""

    def __init__(self, url: str, grpc: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.grpc = grpc
        self._process = process

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def cpu_seconds(self) -> float:
        """What all its processes have used so far, those that ended excepted."""
        return sum(self.cpu_seconds_each(""))

    def cpu_seconds_each(self, role: str) -> list[float]:
        """Of each process whose command ends so."""
        first = psutil.Process(self._process.pid)
        found = [one for one in (first, *first.children(recursive=True)) if " ".join(one.cmdline()).endswith(role)]
        return [times.user + times.system for times in (one.cpu_times() for one in found)]


@contextmanager
def running(*command: str, log: Path | None = None) -> Iterator[Server]:
    """A server that is ready, by `python COMMAND --port PORT`, until the end of the block; what it says goes to `log`."""
    port, grpc_port = free_ports(2)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEQSERVE_")}
    path = (str(ROOT), str(ROOT / "examples"), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    environment["SEQSERVE_GRPC_PORT"] = str(grpc_port)
    with log.open("wb") if log else nullcontext() as said:
        # In a process group of its own: an interrupt at the keyboard ends the load first.
        process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=said,
            process_group=0,
        )
    server = Server(f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", process)
    try:
        _await_ready(server)
        yield server
    finally:
        process.send_signal(signal.SIGINT)  # SIGTERM would be followed by a lame-duck time
        process.wait(STOP_SECONDS)


def seqserve(*flags: str) -> tuple[str, ...]:
    """This service as a command, with the embedded models unless a flag names others."""
    return ("-m", "service", "serve", *flags)


def plain(folder: Path) -> tuple[str, ...]:
    """The plain handler as a command."""
    return ("-m", "loadtest.plain_fastapi", str(folder))


def free_port() -> int:
    [port] = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """Different ones."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]


def _await_ready(server: Server) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if not server.running:
            raise RuntimeError("the server ended before it was ready: its log says why")
        try:
            with urllib.request.urlopen(f"{server.url}/readyz", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the server on {server.url} was not ready within {START_SECONDS} s")
