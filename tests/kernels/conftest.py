"""Fills unwritten memory with NaN, so that a missing output is noticed. No scratch memory is kept with the numbers of an earlier call."""

from __future__ import annotations

from collections.abc import Iterator
from threading import local

import pytest

from kernels.cpu import threads
from tests.kernels.inputs import poisoned_memory


@pytest.fixture(autouse=True, scope="package")
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "LARGEST_KEPT_BYTES", 0)
        patch.setattr(threads, "_kept", local())
        yield
