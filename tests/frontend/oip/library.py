"""The service's gRPC handlers on a server of the gRPC library."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from service.access.caller import LOCAL
from service.frontend.origin import NO_ORIGIN, RequestIdentity, RequestIds


class LibraryContext:
    """The context of a call in the library's server, with the additions of this service's own server."""

    caller = LOCAL
    identity = RequestIdentity(NO_ORIGIN, RequestIds())
    session = None

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class LibraryHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The handlers of `rpc_handlers`, called with a LibraryContext."""

    def __init__(self, handlers: grpc.GenericRpcHandler) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        method: Any = self._handlers.service(handler_call_details)
        if method is None:
            return None

        async def answer(request: bytes, context: Any) -> Any:
            return await method.unary_unary(request, LibraryContext(context))

        async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
            await method.stream_stream(requests, LibraryContext(context))

        if method.request_streaming:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)
