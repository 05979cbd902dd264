"""uvicorn's WebSocket protocol with four corrections. tests/frontend/rest/test_websocket.py tests each of them.

uvicorn takes a protocol class as a setting (`ws=`) but has no hook for these cases. The class therefore overrides methods of uvicorn's
implementation and uses its undocumented attributes; constraints.txt pins the version of uvicorn. The alternative is a new protocol on
websockets' ServerProtocol: it would repeat uvicorn's handshake, flow control and keepalive.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from service.frontend.rest.websocket import SERVICE_RESTART

CLOSE_SECONDS = 1.0
"""Longest wait for the client's close frame after the service has sent its own."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, which drains on shutdown and closes connections with the right code."""

    def shutdown(self) -> None:
        """Queue the disconnect behind the messages that have arrived: the application answers them and then closes the socket.

        uvicorn would close the socket at once and lose these replies.
        """
        if self.handshake_complete and not self.close_sent:
            self.stop_keepalive()
            self.close_timeout = CLOSE_SECONDS
            self.queue.put_nowait({"type": "websocket.disconnect", "code": SERVICE_RESTART, "reason": None})
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Close the connection after a handshake that cannot be parsed. uvicorn would keep it open without a reply."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.transport.close()

    def handle_parser_exception(self) -> None:
        """Send the close frame for a message that is too large or malformed, and read on until the client closes.

        uvicorn would close the connection while data still arrives; the kernel then resets it, and the client loses the close frame.
        """
        if self.close_timer is not None:
            return
        assert self.conn.close_sent is not None, "the parser has failed the connection"
        self.queue.put_nowait({"type": "websocket.disconnect", "code": self.conn.close_sent.code, "reason": None})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.close_timer = self.loop.call_later(CLOSE_SECONDS, self.transport.close)
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    async def send(self, message: Any) -> None:
        """Send an ASGI event. A refused handshake counts as complete: uvicorn would log an error for it."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True
