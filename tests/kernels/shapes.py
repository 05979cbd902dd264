"""The LSTM's launch shapes, which are found once for a device, on a device that a test makes up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kernels.lstm import launch


@contextmanager
def found_anew() -> Iterator[None]:
    """Nothing that was found before is used, and nothing that is found meanwhile is used after."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for found in (launch._either_shape, launch._cluster_shape, launch._grid_shape, launch._plan):
        found.cache_clear()
