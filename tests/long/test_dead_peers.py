"""A WebSocket client that has gone without closing its connection is found by the pings of the service."""

from __future__ import annotations

from pathlib import Path

from tests.raw_websocket import PING, PONG, close_code, frame, open_socket, receive_frame
from tests.serving import serving


def test_client_that_answers_no_ping_is_closed(models_folder: Path, tmp_path: Path) -> None:
    deadlines = {"default_deadline_ms": "1000", "max_deadline_ms": "1000"}
    with serving(models_folder, tmp_path, **deadlines) as server, open_socket(server) as dead, open_socket(server) as silent:
        opcode, payload = receive_frame(silent)
        assert opcode == PING
        silent.sendall(frame(PONG, payload))
        assert close_code(dead) == 1011
        assert receive_frame(silent)[0] == PING
