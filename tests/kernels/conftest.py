"""Memory that a kernel did not write is NaN, so that an output left out shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _poisoned_memory() -> Iterator[None]:
    """In its deterministic mode torch fills what `empty` gives with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
