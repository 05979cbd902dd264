"""The caches of the launch shapes of LSTMs and GRUs, for tests that replace the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kernels import launching
from kernels.persistent import launch


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
        launch.adaptive_shape,
        launch.fastest_shape,
        launch.cluster_shape,
        launch.grid_shape,
        launch.wide_shape,
        launch.levels_shape,
        launch._plan,
        launching.multiprocessors,
    ):
        function.cache_clear()
