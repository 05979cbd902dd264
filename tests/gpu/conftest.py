"""Marks every test of this folder with `gpu`, so that it is skipped without a GPU. Fills memory with NaN for the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.inputs import poisoned_memory

HERE = Path(__file__).parent
SHARED = {"server", "engines", "on_device"}


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """Fill unwritten memory with NaN, so that a missing output is noticed."""
    with poisoned_memory():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker run all tests of a file that share a server or an engine."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("gpu")
            if SHARED & {*getattr(item, "fixturenames", ())}:
                item.add_marker(pytest.mark.xdist_group(item.path.stem))
