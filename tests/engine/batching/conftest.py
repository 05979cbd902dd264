"""The batcher of most tests."""

from __future__ import annotations

import pytest

from tests.engine.batching.harness import BatcherHarness


@pytest.fixture
def harness() -> BatcherHarness:
    return BatcherHarness()
