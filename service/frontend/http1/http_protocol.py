"""The hot path of HTTP: the endpoints of inference answered with callbacks below uvicorn, without ASGI, tasks and futures.

A request that is in any way unusual goes to uvicorn's own protocol as the bytes that arrived, and from there to the ASGI application: the
general path. Both paths share validation, dispatch and the writing of answers, and return the same bytes for the same request.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from service.errors import (
    InvalidRequest,
    Overloaded,
    ServiceError,
    TooLarge,
)
from service.frontend.guards.connection_guard import Phase, UnreadBytes, longest_age, retirement, slow_request
from service.frontend.guards.reading_turns import ReadingTurn
from service.frontend.http1.hot_path import MAX_HEAD_BYTES, Call, Endpoint, HotPath, error_head
from service.frontend.http1.limited_parser import LimitedParser
from service.frontend.http1.request_heads import RequestHead
from service.frontend.http1.websocket_handshake import check_handshake
from service.frontend.rest.http_exchange import error_body
from service.frontend.run.origin import NO_ORIGIN, Header
from service.metrics import CLOSED_FOR

MAX_WAITING_BYTES = 1 << 16
"""Bytes of pipelined requests that are read before the running request is answered."""
MAX_PARSE_BYTES = 1 << 12
"""Bytes that the general path parses before it checks whether requests wait for the running request: the parser prepares every request."""
MAX_JOINED_BYTES = 1 << 16
"""A larger reply is not copied behind its head."""
ACCEPT_SECONDS = 0.1
"""Every request that a client sent before the shutdown has arrived after this time."""
LINGER_SECONDS = 1.0
"""How long a connection is still read after a request was refused in the middle."""
_HEAD_END = b"\r\n\r\n"
_HEAD_END_BYTES = len(_HEAD_END)


class _Flow(FlowControl):
    """Does not read further bytes while the connection holds enough, even if the application asks for more."""

    def __init__(self, transport: asyncio.Transport, turn: ReadingTurn[HttpProtocol]) -> None:
        super().__init__(transport)
        self._turn = turn

    def resume_reading(self) -> None:
        connection = self._turn.reader
        if self.read_paused and (connection is None or connection.may_read):
            super().resume_reading()


class HttpProtocol(LimitedParser):
    """One HTTP connection. Requests run one at a time; later requests wait in the order of arrival."""

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], *, hot_path: HotPath
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.hot_path = hot_path
        self._request_ids = hot_path.frontend.request_ids
        self._starts = hot_path.frontend.limits.starts
        self._turn = ReadingTurn(hot_path.frontend.limits.turns, self)
        self.origin, self.request_id = NO_ORIGIN, b""
        self.trace_headers: tuple[Header, ...] = ()
        self._general = False
        """Whether the connection's bytes go to the general path."""
        self._unparsed = b""
        """Bytes that the general path leaves until the requests before them are answered."""
        self._late_refusal: ServiceError | None = None
        """A refusal that waits for the replies to the requests before it."""
        self._running: RequestResponseCycle | None = None
        """The request that the general path answers, or has answered last."""
        self._call: Call | None = None
        self._incomplete: Endpoint | None = None
        """The endpoint of a request whose body has not arrived yet, or that waits for its turn."""
        self._parts: list[bytes] = []
        """Bytes that arrived and are not handled yet."""
        self._size = 0
        self._needed = 0
        """Size of `_parts` at which the first request in them is complete, as far as known."""
        self._last_request = False
        """Whether bytes after the running request are ignored."""
        self._last_reply = False
        """Whether the connection closes after the running request."""
        self._closing_later: asyncio.TimerHandle | None = None
        """Closes the connection a little after a refusal."""
        self.phase_began = self.loop.time()
        self._retires = retirement(self.phase_began, longest_age(hot_path.frontend.settings))
        self.received_bytes = 0
        self._unread = UnreadBytes()

    @property
    def phase(self) -> Phase:
        if self._last_request or self.transport.is_closing():
            return Phase.CLOSING
        incomplete = self._message_begun and not self._unparsed
        if incomplete or (self._parts and self._call is None and not self.flow.write_paused):
            return Phase.RECEIVING
        if self._call is not None or self.flow.write_paused or (self._general and not self._general_path_idle()):
            return Phase.RUNNING
        return Phase.IDLE

    @property
    def peer(self) -> str:
        return "" if self.client is None else self.client[0]

    @property
    def may_read(self) -> bool:
        """Whether more bytes may arrive: none wait for a turn, and few wait for the requests before them, or all are ignored."""
        few = self._size + len(self._unparsed) <= max(MAX_WAITING_BYTES, self._needed)
        return self._last_request or (few and not self._turn.waits)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._turn)

    def data_received(self, data: bytes) -> None:
        """Answer hot requests, and pass the bytes of all others to the general path."""
        if self._last_request:
            return
        if self._general:
            if not self._general_path_idle():
                self._unparsed += data
                self._turn.take()
                if not self.may_read:  # the application reads on while it waits for the end of the connection
                    self.flow.pause_reading()
                return
            self._general = False
        self._parts.append(data)
        self._size += len(data)
        if self._call is None:
            if self._size < self._needed:
                self._count_received(self._size)
                return
            self._start_next()
        if self._size > MAX_WAITING_BYTES and self._call is not None and self._size > self._needed:
            self.flow.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the running request."""
        if self._call is not None:
            self._call.disconnect()
            self._call = None
        self._abandon_incomplete()
        self._count_received(0)
        self._unparsed, self._late_refusal = b"", None
        self._turn.close()
        self.pipeline.clear()
        if self._running is not None:
            _disconnect(self._running)  # uvicorn tells only the request that arrived last
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after an error, uvicorn would keep this object until the connection would have been idle
        if self._closing_later is not None:
            self._closing_later.cancel()  # it would keep this object until it closes the connection
        # They refer to each other. Without this, connections would pile up until a garbage collection, which takes 50 ms then.
        self.cycle = self._running = self._current = None  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Close the connection after the running request, or soon if none runs and none arrives."""
        if self._general and not self._general_path_idle():
            super().shutdown()
            return
        self._last_reply = True
        self.loop.call_later(ACCEPT_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.phase is Phase.IDLE:
            self.transport.close()

    def resume_writing(self) -> None:
        """Continue with the requests that wait while the client reads its replies slowly."""
        super().resume_writing()
        if not self._general:
            self.flow.resume_reading()
        self._start_waiting()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Let the application answer a request. uvicorn calls this."""
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        self.phase_began = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.loop.time() > self._retires and not self.pipeline:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._count_received(0)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if last and self._late_refusal is not None and not self.transport.is_closing():
            self._send_refusal(self._late_refusal)
        elif self._unparsed:
            self.phase_began = self.loop.time()
            self.flow.pause_reading()
            self.loop.call_soon(self._continue_general)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to the WebSocket protocol, unless too many sockets are open. uvicorn calls this."""
        hot_path = self.hot_path
        if self._answers_a_request():
            self._refuse(
                InvalidRequest("the handshake of a WebSocket came before the reply to an earlier request: wait for that reply")
            )
            return
        if hot_path.open_sockets >= hot_path.max_sockets:
            problem = f"{hot_path.open_sockets} WebSockets are open, half of the most connections"
            self._refuse(Overloaded(f"{problem}: retry later, or raise SEQSERVE_MAX_CONNECTIONS", retry_after=1))
            return
        try:
            check_handshake(self.url, self.headers)
            hot_path.frontend.limits.memory.check_new_session()
        except (InvalidRequest, Overloaded) as error:
            self._refuse(error)
            return
        self._last_request = True
        self.ws_protocol_class = partial(self.ws_protocol_class, hot_path=hot_path)  # type: ignore[arg-type, assignment, call-arg, misc]
        if self._turn.paused:
            self.transport.resume_reading()  # the protocol of the WebSocket pauses it by itself
        self._turn.close()
        super().handle_websocket_upgrade()
        self.parser = self.cycle = self._running = self._current = None  # type: ignore[assignment] # as at the end of a connection

    def _unsupported_upgrade_warning(self) -> None:
        """Read nothing more: uvicorn calls this for an upgrade that is ignored."""
        self._last_request = True

    # The connection guard.

    @property
    def unread_bytes(self) -> int:
        return self._unread.size

    def unread_since(self, now: float) -> float | None:
        return self._unread.since(self.transport, now)

    def close_idle(self) -> None:
        self.timeout_keep_alive_handler()

    def refuse_slow_request(self) -> None:
        self._refuse(slow_request())

    def abort(self) -> None:
        self.transport.abort()

    # Replies of the hot path.

    def respond(self, content: bytes | memoryview, headers: bytes) -> None:
        """Send a successful reply to the running request."""
        self._reply(b"200 OK", content, headers)

    def respond_error(self, error: ServiceError) -> None:
        """Send an error as the reply to the running request."""
        self._last_reply |= isinstance(error, TooLarge)
        status, headers = error_head(error)
        self._reply(status, error_body(error), headers)

    def _general_path_idle(self) -> bool:
        """Return whether the general path has answered all that it read, so that the next byte begins a request."""
        waiting = self._message_begun or self.pipeline or self._unparsed
        return not waiting and (self.cycle is None or self.cycle.response_complete)

    def read_turn(self, until: float) -> bool:
        """Pass bytes to the general path, as `Reader` says, until a request waits for the running one."""
        data, parsed, self._unparsed = self._unparsed, 0, b""
        while parsed < len(data) and not (self.pipeline or self._last_request):
            if parsed and time.monotonic() > until:
                break
            self._parse_general(data[parsed : parsed + MAX_PARSE_BYTES])
            parsed += MAX_PARSE_BYTES
        self._unparsed = data[parsed:]
        return bool(self._unparsed) and not (self.pipeline or self._last_request)

    def pause_turn(self) -> None:
        self.flow.pause_reading()

    def resume_turn(self) -> None:
        if self._last_request or not (self.pipeline or self._holds_large_body() or self.transport.is_closing()):
            self.flow.resume_reading()

    def _holds_large_body(self) -> bool:
        """Return whether the application has not read enough of a body: uvicorn reads on when it has."""
        return self.cycle is not None and len(self.cycle.body) > HIGH_WATER_LIMIT

    def _parse_general(self, data: bytes) -> None:
        self._count_received(self.received_bytes + len(data))
        if not self._last_request:
            self._parse(data)

    def _continue_general(self) -> None:
        """Continue with the bytes that the general path left."""
        if self._unparsed and not (self._turn.waits or self.pipeline or self.transport.is_closing()):
            data, self._unparsed = self._unparsed, b""
            if not self._holds_large_body():
                self.flow.resume_reading()
            self.data_received(data)

    def _start_next(self) -> None:
        """Start the first of the requests that arrived, if it is complete and the client reads its replies.

        It waits for its turn if the frontend is busy.
        """
        if self.flow.write_paused:
            self.flow.pause_reading()
            return
        data = b"".join(self._parts)
        end = data.find(_HEAD_END) + _HEAD_END_BYTES
        in_limits = _HEAD_END_BYTES <= end <= MAX_HEAD_BYTES
        head = self.hot_path.heads.find(data[:end]) if in_limits else None
        endpoint = self.hot_path.find_endpoint(head) if head is not None else None
        if head is None or endpoint is None or not endpoint.accepts(head):
            self._pass_on(data)
            return
        needed = end + head.length
        if self._size < needed:
            if self._needed == 0:
                self.phase_began = self.loop.time()
            self._keep(data, needed, endpoint)
            self.flow.resume_reading()
            return
        arrived = time.monotonic()
        if not self._starts.must_wait(arrived):
            self._start(endpoint, head, data, end, arrived)
            return
        self._keep(data, needed, endpoint)
        if not self._last_request:
            self._call = self._starts.add(arrived, partial(self._take_turn, endpoint, head, end))

    def _keep(self, data: bytes, needed: int, endpoint: Endpoint) -> None:
        """Keep what arrived of a request, which is not complete, or waits for its turn."""
        self._unset_keepalive_if_required()
        self._parts, self._needed, self._incomplete = [data], needed, endpoint
        self._count_received(min(self._size, needed))

    def _take_turn(self, endpoint: Endpoint, head: RequestHead, end: int, arrived: float) -> None:
        """Start the request whose turn has come."""
        self._call = None
        if not self.transport.is_closing():
            self._start(endpoint, head, b"".join(self._parts), end, arrived)

    def _start(self, endpoint: Endpoint, head: RequestHead, data: bytes, end: int, arrived: float) -> None:
        """Start the request at the beginning of `data`, all that arrived, or pass it to the general path. end: of its head."""
        if self._incomplete is not None:
            self._incomplete = None
            self._count_received(0)
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        needed = end + head.length
        body, rest = data[end:needed], data[needed:]
        self._parts, self._size, self._needed = [rest] if rest else [], self._size - needed, 0
        self.origin = head.origin
        self.request_id = head.origin.request_id or self._request_ids.take()
        self.trace_headers = ()
        try:
            self._call = endpoint.start(head, body, self, arrived)
        except Exception as error:
            self.respond_error(self.hot_path.frontend.error_for(error))
        else:
            if self._call is None:
                self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        """Let the general path answer the bytes that arrived, until it is idle again."""
        self._general = True
        self._parts, self._size, self._needed, self._incomplete = [], 0, 0, None
        self._count_received(0)
        self._unparsed = data
        self._turn.take()

    def _reply(self, status: bytes, content: bytes | memoryview, headers: bytes) -> None:
        self._call, now, size = None, self.loop.time(), len(content)
        # A request that has arrived already still gets its reply on this connection.
        self._last_reply |= self.hot_path.frontend.draining or (now > self._retires and not self._parts)
        if self._last_reply:
            headers += b"connection: close\r\n"
        if self.trace_headers:
            headers += b"".join([b"%b: %b\r\n" % pair for pair in self.trace_headers])
        head = self.hot_path.reply_head(status, self.server_state.default_headers, size, self.request_id, headers)
        if size <= MAX_JOINED_BYTES:
            self.transport.write(head + content)
        else:
            self.transport.writelines((head, content))
        self.server_state.total_requests += 1
        self.phase_began = now
        if self._last_reply:
            self.transport.close()
        else:
            if self.flow.read_paused:
                self.flow.resume_reading()
            if self._parts:
                self.loop.call_soon(self._start_waiting)

    def _start_waiting(self) -> None:
        """Start a request that arrived while the previous request ran."""
        waiting = self._parts and self._size >= self._needed
        if waiting and self._call is None and not self._general and not self.transport.is_closing():
            self._start_next()

    def _abandon_incomplete(self) -> None:
        """Drop the bytes of a request that will never be complete."""
        self._parts.clear()
        if self._incomplete is not None:
            self._incomplete.abandon()
            self._incomplete = None

    def _count_received(self, size: int) -> None:
        """Record how much of an incomplete request has arrived. A large request is refused when all connections together hold too much."""
        bodies = self.hot_path.frontend.limits.bodies
        bodies.add(size - self.received_bytes)
        self.received_bytes = size
        if size > MAX_WAITING_BYTES:
            try:
                bodies.check()
            except Overloaded as error:
                self._refuse(error)

    def _refuse(self, error: ServiceError) -> None:
        """Send an error for a request that cannot be read to its end, after the replies to earlier requests, and close the connection."""
        if self._last_request:
            return
        if error.code in CLOSED_FOR:
            self.hot_path.frontend.metrics.connections_closed.add(error.code)
        self.hot_path.frontend.limits.retries.charge(error)
        self._last_request = True
        self._abandon_incomplete()
        refused = self._current
        if refused is not None and refused is self._running:
            _disconnect(refused)
            self._send_refusal(None if refused.response_started else error)
            return
        if self.pipeline and self.pipeline[0][0] is refused:
            self.pipeline.popleft()
        if self._answers_a_request():
            self._late_refusal = error
        else:
            self._send_refusal(error)

    def _answers_a_request(self) -> bool:
        """Return whether a request of the general path is not answered yet."""
        return self._running is not None and not self._running.response_complete

    def _send_refusal(self, error: ServiceError | None) -> None:
        """Send an error, and close the connection a little later: a client that still sends would lose the error with the connection.

        error: None for a request that has a reply already.
        """
        if error is not None:
            status, headers = error_head(error)
            headers += b"connection: close\r\n"
            content, request_id = error_body(error), self._request_ids.take()
            head = self.hot_path.reply_head(status, self.server_state.default_headers, len(content), request_id, headers)
            self.transport.write(head + content)
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            with suppress(OSError):  # the client has aborted the connection
                self.transport.write_eof()
        self.flow.resume_reading()
        self._closing_later = self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell a request of the general path that its client is gone."""
    cycle.disconnected = True
    cycle.message_event.set()
