"""A real Redis server for tests, which `make programs PROGRAMS=redis` unpacks."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.servers import free_ports
from tests.serving import eventually


class Redis:
    """A server on a port that stays the same. Its data is gone when it is stopped."""

    def __init__(self, program: str, folder: Path) -> None:
        self._port = free_ports(1)[0]
        self._command = [program, "--port", str(self._port), "--save", "", "--dir", str(folder)]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        eventually(self._answers)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False


@contextmanager
def running_redis(folder: Path) -> Iterator[Redis]:
    """Run a server within the context; skips the test without the program or the client."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: make programs PROGRAMS=redis")
    pytest.importorskip("redis")
    redis = Redis(program, folder)
    try:
        yield redis
    finally:
        redis.stop()
