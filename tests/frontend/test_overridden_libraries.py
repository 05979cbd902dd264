"""The service overrides internals of uvicorn and websockets, which no version number protects: a change of their code needs a look."""

import hashlib
import inspect

import pytest

from service.frontend.http1.http_protocol import _Flow
from service.frontend.http1.limited_parser import LimitedParser
from service.frontend.http1.websocket_protocol import WebSocketProtocol, _FrameParser, _FrameReader
from service.frontend.server import FrontendServer

DIGESTS = {
    FrontendServer: "06e799f7c58f",
    LimitedParser: "18fdf324b11b",
    WebSocketProtocol: "0bbcec989384",
    _Flow: "126debcdaa89",
    _FrameParser: "0f586bb7c48f",
    _FrameReader: "ce642455b648",
}
"""The beginning of the SHA-256 of the source of the class that each of these overrides."""


@pytest.mark.parametrize("overriding", DIGESTS)
def test_overridden_class_is_the_known_one(overriding: type) -> None:
    digest = hashlib.sha256(inspect.getsource(overriding.__bases__[0]).encode()).hexdigest()[:12]
    assert digest == DIGESTS[overriding], f"{overriding.__bases__[0]} has changed: compare it with what {overriding} overrides"
