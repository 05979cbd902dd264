"""One `seqserve serve` as the child process of a Ray replica: start, watch and drain. Knows no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from deploy.ray.metrics import Figures, reachable_peers

READY = re.compile(r"ready on (?P<http>https?://\S+)(?: and for gRPC on (?P<grpc>\S+))?")
PR_SET_PDEATHSIG = 1
KEPT_LINES = 20
REQUEST_SECONDS = 5.0


class ServerFailed(Exception):
    """The server ended, or is not ready."""


class ServerProcess:
    """A running server. url: of its HTTP port; grpc: host and port of its gRPC port."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, grpc: str, log: deque[str], key_file: str) -> None:
        self._process = process
        self.url = url
        self.grpc = grpc
        self._log = log
        self._key_file = key_file
        self._figures = Figures()
        self._stopping = False
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_SECONDS))
        self._reading = asyncio.ensure_future(_forward(process, log))

    @classmethod
    async def start(
        cls, command: Sequence[str], settings: Mapping[str, str], host: str, seconds: float, key_file: str = ""
    ) -> ServerProcess:
        """Start the server on free ports of `host` and wait until it is ready. Raises ServerFailed after `seconds`.

        command: `seqserve serve` with its flags; settings: SEQSERVE_ variables by name; key_file: has a key for /metrics, empty for none.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--host", host, "--port", "0", "--grpc-port", "0"),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | dict(settings),
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        log: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            ready = await asyncio.wait_for(_until_ready(process, log), seconds)
        except TimeoutError:
            ready = None
        if ready is None:
            _kill(process)
            raise ServerFailed(f"{' '.join(command)} was not ready in {seconds:g} s: read its log on this node")
        return cls(process, ready["http"], ready["grpc"] or "", log, key_file)

    async def check(self) -> None:
        """Raise ServerFailed unless the server runs and /readyz returns 200."""
        if self._process.returncode is not None:
            raise ServerFailed(f"seqserve ended with status {self._process.returncode}")
        try:
            async with self._client.get(f"{self.url}/readyz") as answer:
                if answer.status != 200:
                    raise ServerFailed(f"/readyz returned {answer.status}: {await answer.text()}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerFailed(f"/readyz gave no answer: {error!r}") from error

    async def figures(self) -> dict[str, float]:
        """Return the figures that scale the service."""
        return self._figures.read(await self._metrics(), time.monotonic())

    async def peers(self) -> int:
        """Return how many other replicas the server is connected to."""
        return reachable_peers(await self._metrics())

    async def _metrics(self) -> str:
        """Return the text of /metrics. Raises ServerFailed if the server refuses it: without figures nothing would be scaled."""
        headers = {"Authorization": f"Bearer {Path(self._key_file).read_text().strip()}"} if self._key_file else {}
        async with self._client.get(f"{self.url}/metrics", headers=headers) as answer:
            text = await answer.text()
        if answer.status != 200:
            raise ServerFailed(f"/metrics returned {answer.status} to the key in {self._key_file or 'no key_file'}: {text}")
        return text

    async def ended(self) -> int:
        """Wait until the server ends by itself. Returns its exit status. Never returns once `stop` was called."""
        status = await self._process.wait()
        if self._stopping:
            await asyncio.Event().wait()
        return status

    async def stop(self, seconds: float) -> None:
        """Send SIGTERM and wait for lame duck and drain. After `seconds`, kill what is left."""
        self._stopping = True
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), seconds)
            except TimeoutError:
                _kill(self._process)
        await self._reading
        await self._client.close()


async def _until_ready(process: asyncio.subprocess.Process, log: deque[str]) -> re.Match[str] | None:
    """Read the output until the line with the addresses. Returns None at its end."""
    assert process.stdout is not None
    async for line in process.stdout:
        log.append(line.decode(errors="replace"))
        if ready := READY.search(log[-1]):
            return ready
    return None


async def _forward(process: asyncio.subprocess.Process, log: deque[str]) -> None:
    """Read the rest of the output, so that the server never waits for a reader."""
    assert process.stdout is not None
    async for line in process.stdout:
        log.append(line.decode(errors="replace"))
    await process.wait()


def free_port(host: str) -> int:
    """Return a TCP port that is free on this address now: the server has no ready line for its port for other replicas."""
    with socket.create_server((host, 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM to the server when the replica's process dies: nobody else would end it, and it holds the device."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill(process: asyncio.subprocess.Process) -> None:
    """End all processes of the server: they are one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
