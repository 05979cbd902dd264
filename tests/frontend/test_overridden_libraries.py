"""The service overrides internals of uvicorn and websockets, which no version number protects: a change of their code needs a look."""

import hashlib
import inspect

import pytest

from service.frontend.http_protocol import HttpProtocol, _Flow
from service.frontend.server import FrontendServer
from service.frontend.websocket_protocol import WebSocketProtocol, _FrameParser, _FrameReader

DIGESTS = {
    "uvicorn.protocols.http.flow_control.FlowControl": "126debcdaa89",
    "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol": "18fdf324b11b",
    "uvicorn.protocols.websockets.websockets_sansio_impl.WebSocketsSansIOProtocol": "0bbcec989384",
    "uvicorn.server.Server": "06e799f7c58f",
    "websockets.server.ServerProtocol": "0f586bb7c48f",
    "websockets.streams.StreamReader": "ce642455b648",
}
"""The beginning of the SHA-256 of the source of each class with overridden methods."""


@pytest.mark.parametrize("overriding", [FrontendServer, HttpProtocol, WebSocketProtocol, _Flow, _FrameParser, _FrameReader])
def test_overridden_class_is_the_known_one(overriding: type) -> None:
    base = overriding.__bases__[0]
    digest = hashlib.sha256(inspect.getsource(base).encode()).hexdigest()[:12]
    name = f"{base.__module__}.{base.__qualname__}"
    assert DIGESTS[name] == digest, (
        f"{name} has changed: compare it with what {overriding.__name__} overrides, then note {digest}"
    )
