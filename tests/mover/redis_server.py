"""A real Redis server for tests, which `make redis` unpacks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.servers import free_port
from service.mover.checkpoint_store import RedisStore, StoreFailed
from tests.serving import eventually


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Yield the URL of a server; skips the test without the program or the client."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: make redis")
    pytest.importorskip("redis")
    port = free_port()
    server = subprocess.Popen([program, "--port", str(port), "--save", "", "--dir", str(folder)], stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        eventually(lambda: _answers(url))
        yield url
    finally:
        server.kill()
        server.wait()


def _answers(url: str) -> bool:
    try:
        RedisStore(url, 1.0).find("nothing")
    except StoreFailed:
        return False
    return True
