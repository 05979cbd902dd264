"""What the driver is told of a matrix. That it is right, the kernels that fetch through such maps show on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from kernels import tensormap


class Driver:
    """Stands for CUDA's: what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.status = 0
        self.cuTensorMapEncodeTiled = self.encode

    def encode(self, room: Any, *others: Any) -> int:
        self.asked.append(tuple(tuple(one) if isinstance(one, ctypes.Array) else getattr(one, "value", one) for one in others))
        at = ctypes.cast(room, ctypes.c_void_p).value or 0
        assert at % 64 == 0
        ctypes.memset(at, len(self.asked), tensormap.MAP_BYTES)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(tensormap, "driver", lambda: found)
    tensormap.mapped.cache_clear()
    yield found
    tensormap.mapped.cache_clear()


def test_the_driver_is_told_of_columns_before_rows(driver: Driver) -> None:
    assert tensormap.mapped(4096, 1000, 24, 64, 32) == b"\1" * tensormap.MAP_BYTES
    assert driver.asked == [(1, 2, 4096, (24, 1000), (48,), (32, 64), (1, 1), 0, 3, 2, 0)]


def test_a_matrix_is_mapped_once(driver: Driver) -> None:
    maps = [tensormap.mapped(address, 10, 8, 64, 64) for address in (16, 32, 16)]
    assert maps[0] == maps[2] != maps[1]
    assert len(driver.asked) == 2


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"at 0x10, 10 x 8, was not mapped: CUDA error 1"):
        tensormap.mapped(16, 10, 8, 64, 64)
