"""An event loop with a clock that tests set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frontend.http2.peer import ClockLoop, Peer


@pytest.fixture
def loop() -> Iterator[ClockLoop]:
    loop = ClockLoop()
    yield loop
    loop.close()


@pytest.fixture
def peer(loop: ClockLoop) -> Peer:
    return Peer(loop)
