"""The front process: one uvicorn server on the port that the supervisor opened, and the supervisor's words beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import uvicorn
from fastapi import FastAPI

from service.channel import Channel, Frame, Kind
from service.errors import Unavailable
from service.faces.http import Front
from service.lifeline import tell
from service.metrics import Snapshot

SCRAPE_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15


class Control:
    """The supervisor's end of this front: engines to attach, counts to give, metrics to ask for."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._scrapes: dict[int, asyncio.Future[Snapshot]] = {}
        self._last_id = 0

    def listen(self, front: Front) -> None:
        """Obey from now on: the server takes connections."""
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._receive, front)

    def ready(self) -> None:
        """An engine has said hello: requests are answered."""
        tell(self._channel, Kind.READY)

    def failed(self, reason: str) -> None:
        """This front cannot start."""
        tell(self._channel, Kind.FAILED, reason)

    async def scrape(self) -> Snapshot:
        """The counts of all processes, gathered by the supervisor."""
        self._last_id += 1
        id, future = self._last_id, asyncio.get_running_loop().create_future()
        self._scrapes[id] = future
        tell(self._channel, Kind.SCRAPE, id=id)
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                snapshot: Snapshot = await future
                return snapshot
        except TimeoutError:
            raise Unavailable("the supervisor did not gather the metrics in time: retry", retry_after=1) from None
        finally:
            self._scrapes.pop(id, None)

    def _receive(self, front: Front) -> None:
        for frame in self._channel.receive():
            self._obey(frame, front)
        if not self._channel.open:
            # The supervisor has gone, and with it the ports and the engine: nothing is left to drain to.
            os._exit(1)

    def _obey(self, frame: Frame, front: Front) -> None:
        if frame.kind == Kind.ATTACH and frame.attached is not None:
            front.engines.attach(Channel(frame.attached))
        elif frame.kind == Kind.DRAIN:
            front.draining = True
        elif frame.kind == Kind.GATHER:
            tell(self._channel, Kind.COUNTS, front.metrics.snapshot(), frame.id)
        elif frame.kind == Kind.SCRAPED:
            future = self._scrapes.get(frame.id)
            if future is not None and not future.done():
                future.set_result(frame.read(Snapshot))


class Server(uvicorn.Server):
    """uvicorn, listening to the supervisor once it takes connections. SIGTERM drains it; an interrupt is not its business."""

    def __init__(self, config: uvicorn.Config, control: Control, front: Front) -> None:
        super().__init__(config)
        self._control = control
        self._front = front

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._control.listen(self._front)


def serve(app: FastAPI, front: Front, control: Control, listening: socket.socket) -> None:
    """Serve until SIGTERM; requests in flight then have `drain_seconds` to end."""
    front.metrics.start({(one.spec.name, one.version) for versions in front.catalog.values() for one in versions.values()})
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(front.settings.drain_seconds)),
    )
    Server(config, control, front).run(sockets=[listening])
