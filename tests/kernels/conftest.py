"""Fills unwritten memory with NaN, so that a missing output is noticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.inputs import poisoned_memory


@pytest.fixture(autouse=True, scope="package")
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield
