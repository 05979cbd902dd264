"""Answers requests to the hot path's endpoints that have no valid key: a client that guesses keys takes little time from the others."""

from __future__ import annotations

import asyncio

from service.access.caller import ANYBODY
from service.access.scopes import Scope
from service.errors import Unauthorized
from service.frontend.http1.hot_path import HttpExchange
from service.frontend.http1.request_heads import RequestHead
from service.frontend.oip.http_infer import PATH
from service.frontend.run.access_log import record
from service.frontend.run.frontend import Frontend

MAX_BODY_BYTES = 1 << 16
"""The general path refuses a request with a larger body before the body has arrived."""


class WaitingRefusal:
    """A refusal that waits because its address has sent several wrong keys."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self._timer = timer

    def disconnect(self) -> None:
        """See `Call.disconnect`."""
        self._timer.cancel()


class KeyRefusals:
    """An endpoint that refuses requests that the endpoints of inference would answer for a caller with a valid key."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def accepts(self, head: RequestHead) -> bool:
        """Return whether the general path would refuse the request for its key too: it looks for a route first."""
        return head.length <= MAX_BODY_BYTES and (head.path == "/infer" or PATH.fullmatch(head.path) is not None)

    def start(self, head: RequestHead, body: bytes, exchange: HttpExchange, arrived: float) -> WaitingRefusal:
        """Count and log the refusal, and send it after its delay. Raises it if it does not wait."""
        assert head.refusal is not None
        message, has_key = head.refusal
        record(self._frontend, ANYBODY, Scope.INFER, f"POST {head.path}", exchange.peer, Unauthorized.code)
        seconds = self._frontend.access.refused_keys.delay(exchange.peer) if has_key else 0.0
        if not seconds:
            raise Unauthorized(message)
        timer = asyncio.get_running_loop().call_later(seconds, exchange.respond_error, Unauthorized(message))
        return WaitingRefusal(timer)

    def abandon(self) -> None:
        """Count nothing: a request without a valid key is no request for inference."""
