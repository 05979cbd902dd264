"""Tests of the driver call that makes a tensor map. The GPU tests of the kernels check the maps themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from kernels import tensormap


class FakeEncodeDriver:
    """A fake CUDA driver that records calls and returns `status`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0
        self.cuTensorMapEncodeTiled = self.encode

    def encode(self, room: Any, *arguments: Any) -> int:
        self.calls.append(
            tuple(tuple(each) if isinstance(each, ctypes.Array) else getattr(each, "value", each) for each in arguments)
        )
        at = ctypes.cast(room, ctypes.c_void_p).value or 0
        assert at % 64 == 0
        ctypes.memset(at, len(self.calls), tensormap.MAP_BYTES)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEncodeDriver]:
    fake = FakeEncodeDriver()
    monkeypatch.setattr(tensormap, "driver", lambda: fake)
    tensormap.tensor_map.cache_clear()
    yield fake
    tensormap.tensor_map.cache_clear()


def test_driver_receives_columns_before_rows(driver: FakeEncodeDriver) -> None:
    assert tensormap.tensor_map(4096, 1000, 24, 64, 32) == b"\1" * tensormap.MAP_BYTES
    assert driver.calls == [(1, 2, 4096, (24, 1000), (48,), (32, 64), (1, 1), 0, 3, 2, 0)]


def test_tensor_map_is_cached(driver: FakeEncodeDriver) -> None:
    maps = [tensormap.tensor_map(address, 10, 8, 64, 64) for address in (16, 32, 16)]
    assert maps[0] == maps[2] != maps[1]
    assert len(driver.calls) == 2


def test_driver_error_raises(driver: FakeEncodeDriver) -> None:
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"10 x 8 matrix at 0x10: CUDA error 1"):
        tensormap.tensor_map(16, 10, 8, 64, 64)
