"""The tests of this folder need a container engine. `make test-all` runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docker.stack import Stack, missing
from tests.serving import eventually


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """The service and Prometheus, built, started and healthy."""
    if reason := missing():
        pytest.exit(reason, returncode=1)
    made = Stack.made_up()
    try:
        made.start("service", "prometheus")
        eventually(lambda: made.reaches("prometheus", "/-/ready"), 30)
        yield made
    finally:
        made.close()
