"""Decisions of the code that builds an engine."""

from __future__ import annotations

import pytest

from service.engine.build import compute_threads
from service.settings import Settings


@pytest.mark.parametrize(
    "cores, frontends, device, threads",
    [(8, 1, "auto", 7), (8, 2, "cpu,cpu", 3), (8, 1, "cpu,cpu,cpu", 2), (2, 1, "cpu,cpu", 1), (1, 4, "cpu", 1)],
)
def test_engines_share_the_cores_that_frontends_leave(cores: int, frontends: int, device: str, threads: int) -> None:
    assert compute_threads(cores, Settings(frontends=frontends, device=device)) == threads
