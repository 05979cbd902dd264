"""Clients that have gone without closing their connections are found by the pings of the service."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from socket import create_connection
from urllib.parse import urlsplit

from service.frontend.oip.grpc_application import STREAM_PATH
from tests.frontend.http2 import peer
from tests.long.fuzz.wire.grpc import frames_of
from tests.long.overload import Lag
from tests.raw_websocket import PING, PONG, close_code, frame, open_socket, receive_frame
from tests.serving import serving

DEAD_SECONDS, SWEEP_SECONDS, SWEEPS, LAGS = 80.0, 1.0, 2, 10
"""The goal, how often the limits are applied, how many of these times the pings and their time-out may begin later, and how many times the
worst lag of this process the connection may end later."""


def test_client_that_answers_no_ping_is_closed(models_folder: Path, tmp_path: Path) -> None:
    deadlines = {"default_deadline_ms": "1000", "max_deadline_ms": "1000"}
    with serving(models_folder, tmp_path, **deadlines) as server, open_socket(server) as dead, open_socket(server) as silent:
        opcode, payload = receive_frame(silent)
        assert opcode == PING
        silent.sendall(frame(PONG, payload))
        assert close_code(dead) == 1011
        assert receive_frame(silent)[0] == PING


def test_grpc_client_that_answers_no_ping_is_closed_within_80_seconds(models_folder: Path, tmp_path: Path) -> None:
    """Its stream is open, and nothing of it arrives any more."""
    with serving(models_folder, tmp_path) as server, Lag() as lag:
        address = urlsplit(f"//{server.grpc}")
        fields = ((b"te", b"trailers"), (b"content-type", b"application/grpc"))
        opened = peer.frame(peer.HEADERS, peer.END_HEADERS, 1, peer.block(*fields, path=STREAM_PATH.encode()))
        with create_connection((address.hostname, address.port or 0), 10 * DEAD_SECONDS) as dead:
            began = time.monotonic()
            dead.sendall(peer.PREFACE + peer.settings() + opened)
            received = b""
            with suppress(ConnectionError):
                while part := dead.recv(1 << 16):
                    received += part
            seconds = time.monotonic() - began
    assert [frame.payload for frame in frames_of(received) if frame.kind == peer.PING] == [b"are you?"]
    assert seconds <= DEAD_SECONDS + SWEEPS * SWEEP_SECONDS + LAGS * lag.worst
