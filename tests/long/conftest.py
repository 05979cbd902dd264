"""What several files of long tests use."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[object], None]:
    """Return a function that prints figures of a test that passes too."""

    def show(figures: object) -> None:
        with capsys.disabled():
            print(f"\n{figures}", end="")

    return show
