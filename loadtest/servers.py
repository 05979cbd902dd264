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

from loadtest.discovery import CannotMeasure
from loadtest.target import Target

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
SEQSERVE = ("-m", "service", "serve")
PORTS = range(12_000, 30_000)
"""Below the ports that systems choose for connections and for sockets without a port."""
LOOPBACK, LISTENING = ("127.0.0.1", "::1", "localhost"), "0A"
START_SECONDS = 60.0
STOP_SECONDS = 60.0


class ServerProcess:
    """A running server. grpc: host and port, for servers that listen there. pid: its first process, None if it runs elsewhere."""

    def __init__(self, url: str, grpc: str = "", pid: int | None = None) -> None:
        self.url = url
        self.grpc = grpc
        self._pid = pid

    def pids(self, role: str = "") -> list[int]:
        """Return the processes with a command line that ends with `role`."""
        processes = () if self._pid is None else _family(self._pid)
        return [pid for pid in processes if Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").endswith(role)]


def found(url: str) -> ServerProcess:
    """Return a server that runs already, with its processes if it listens on a loopback address and they may be read."""
    target = Target.of(url, "")
    if target.host in LOOPBACK:
        listening = f":{target.port:04X}"
        lines = [line.split() for table in Path("/proc/net").glob("tcp*") for line in table.read_text().splitlines()]
        sockets = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(listening) and line[3] == LISTENING}
        for pid in sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
            with suppress(OSError):
                if any(str(file.readlink()) in sockets for file in Path(f"/proc/{pid}/fd").iterdir()):
                    return ServerProcess(url, pid=pid)  # the oldest: the others have inherited its socket
    return ServerProcess(url)


def _family(pid: int) -> Iterator[int]:
    """Yield a process and all processes below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


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
    try:
        _await_ready(f"{url}{ready}", process, log)
        yield ServerProcess(url, grpc, process.pid)
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


def _await_ready(url: str, process: subprocess.Popen[bytes], log: Path | None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CannotMeasure(f"the server exited before it was ready: read its log{f', {log}' if log else ''}")
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise CannotMeasure(f"the server on {url} was not ready within {START_SECONDS} s")
