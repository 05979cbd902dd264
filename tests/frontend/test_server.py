"""The work of a frontend ten times a second besides answering requests."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from typing import Any, cast

import pytest
import uvicorn

from service.frontend.catalog import Catalog
from service.frontend.connection_share import ConnectionShare
from service.frontend.inference import Frontend
from service.frontend.listener import SharedPort
from service.frontend.server import FrontendServer
from service.ipc.connection_counts import ConnectionCounts, Port
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("part", ["access", "tls", "state_keys"])
def test_error_of_periodic_work_is_reported(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """uvicorn would end the frontend."""
    nothing, reported = cast(Any, None), list[Exception]()
    frontend = Frontend(Settings(), Catalog([], {}), nothing, Metrics(), Log("frontend"), nothing)
    monkeypatch.setattr(getattr(frontend, part), "reload", fail)
    monkeypatch.setattr(Frontend, "internal_error", lambda _, error: reported.append(error))
    config = uvicorn.Config(nothing, log_config=None)
    config.load()
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        port = SharedPort(listening, ConnectionShare(ConnectionCounts.create(1).on_port(Port.HTTP), 0))
        server = FrontendServer(config, nothing, frontend, port, None, None, is_restart=False)

        async def tick() -> bool:
            return await server.on_tick(0)

        assert asyncio.run(tick()) is False, "the server goes on"
    assert [type(error) for error in reported] == [ZeroDivisionError]
