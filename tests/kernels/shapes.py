"""The caches of the LSTM's launch shapes, for tests that replace the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kernels import launching
from kernels.lstm import persistent


@contextmanager
def fresh_shape_caches() -> Iterator[None]:
    """Clear the caches of launch shapes before and after the block."""
    _clear()
    try:
        yield
    finally:
        _clear()


def _clear() -> None:
    for function in (
        persistent.fastest_shape,
        persistent.cluster_shape,
        persistent.grid_shape,
        persistent._plan,
        launching.multiprocessors,
    ):
        function.cache_clear()
