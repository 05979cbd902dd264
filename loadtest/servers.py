"""Servers on this machine that a measurement starts and stops."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path

import psutil

from loadtest.discovery import CannotMeasure

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
SEQSERVE = ("-m", "service", "serve")
PORTS = range(12_000, 30_000)
"""Below the ports that systems choose for connections and for sockets without a port."""
START_SECONDS = 60.0
STOP_SECONDS = 60.0


class ServerProcess:
    """A running server and its child processes. grpc: host and port, for servers that listen there."""

    def __init__(self, url: str, grpc: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.grpc = grpc
        self._process = process

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def pids(self, role: str = "") -> list[int]:
        """Return the processes with a command line that ends with `role`."""
        server = psutil.Process(self._process.pid)
        processes = (server, *server.children(recursive=True))
        return [process.pid for process in processes if " ".join(process.cmdline()).endswith(role)]


@contextmanager
def running(*flags: str, log: Path | None = None, folders: Sequence[Path] = (ROOT,)) -> Iterator[ServerProcess]:
    """Run this service until the end of the block, with the embedded models unless a flag names others. stderr goes to `log`.

    folders: the project whose code runs, and then folders with packages that it needs in other versions.
    """
    port, grpc_port = free_ports(2)
    environment = {"PYTHONPATH": python_path(*folders), "SEQSERVE_GRPC_PORT": str(grpc_port)}
    command = (sys.executable, *SEQSERVE, "--port", str(port), *flags)
    url, grpc = f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}"
    with started(command, environment, url, grpc, log=log, folder=folders[0]) as server:
        yield server


@contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    url: str,
    grpc: str = "",
    ready: str = "/readyz",
    log: Path | None = None,
    folder: Path | None = None,
) -> Iterator[ServerProcess]:
    """Run a command until the end of the block. The block starts when `url` answers at the path `ready`; stderr goes to `log`.

    folder: where it runs, unless in the current folder.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SEQSERVE_")}
    with log.open("wb") if log else nullcontext() as stderr:
        # A separate process group: an interrupt at the keyboard ends the load first.
        process = subprocess.Popen(
            command, env=inherited | dict(environment), stdout=subprocess.DEVNULL, stderr=stderr, process_group=0, cwd=folder
        )
    server = ServerProcess(url, grpc, process)
    try:
        _await_ready(server, ready, log)
        yield server
    finally:
        process.send_signal(signal.SIGINT)  # SIGTERM would wait for the lame-duck period
        try:
            process.wait(STOP_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # some servers leave workers behind


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH with which a server in any virtual environment finds this project, or first what is in these folders."""
    return os.pathsep.join(filter(None, (*map(str, folders or (ROOT,)), os.environ.get("PYTHONPATH", ""))))


@contextmanager
def named_or_new(url: str | None, grpc: str | None, log: Path, *flags: str) -> Iterator[tuple[str, str | None]]:
    """Yield the HTTP and gRPC addresses of the named server, or of a new server with these flags."""
    if url:
        yield url.rstrip("/"), grpc
        return
    with running(*flags, log=log) as server:
        yield server.url, server.grpc


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` distinct free TCP ports. Until a server binds them, the system gives them to no other socket."""
    shuffled = random.SystemRandom().sample(PORTS, len(PORTS))
    return list(islice((port for port in shuffled if _is_free(host, port)), count))


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def _await_ready(server: ServerProcess, ready: str, log: Path | None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if not server.running:
            raise CannotMeasure(f"the server exited before it was ready: read its log{f', {log}' if log else ''}")
        try:
            with urllib.request.urlopen(f"{server.url}{ready}", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise CannotMeasure(f"the server on {server.url} was not ready within {START_SECONDS} s")
