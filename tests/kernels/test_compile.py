"""Compilation, the folder of compiled kernels, launches and tensor maps, with fakes of NVRTC and of the CUDA driver."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from contextlib import nullcontext
from errno import ENOSPC
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import compile as compiler
from kernels import folder, tensormap
from kernels.folder import CACHE
from service.settings import Settings
from tests.kernels.devices import KNOWN

KERNELS = Path(compiler.__file__).parent


def test_folder_is_that_of_the_environment_of_the_caller_or_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder.cache_folder() == tmp_path / ".cache" / "seqserve"
    assert Settings().cache == Path(folder.DEFAULT_CACHE)
    monkeypatch.setenv(CACHE, str(tmp_path / "new" / "kernels"))
    assert folder.cache_folder() == tmp_path / "new" / "kernels" and (tmp_path / "new" / "kernels").is_dir()
    folder.set_cache_folder(tmp_path)
    assert folder.cache_folder() == tmp_path
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert folder.cache_folder() is None, "it is read-only"


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A replacement of NVRTC."""
    cupy, cuda, nvrtc = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nvrtc")
    vars(nvrtc)["getVersion"] = lambda: (13, 0)
    vars(cuda)["nvrtc"] = nvrtc
    for module in (cupy, cuda, nvrtc):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return nvrtc


@pytest.fixture
def numbered(nvrtc: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """A compiler that numbers its results, and keeps them in `tmp_path`."""
    numbers = count(1)
    monkeypatch.setattr(compiler, "_machine_code", lambda text, _: f"code {next(numbers)} of {text}".encode())
    monkeypatch.setenv(CACHE, str(tmp_path))
    return compiler._load_or_compile


def test_kernel_is_compiled_once_per_text_and_options(numbered: Callable[..., bytes], tmp_path: Path) -> None:
    codes = [numbered("text", options) for options in (("one",), ("one",), ("two",), ("one",))]
    assert codes == [f"code {number} of text".encode() for number in (1, 1, 2, 1)]
    assert numbered("other", ("one",)) == b"code 3 of other" and len(list(tmp_path.iterdir())) == 3


def test_damaged_file_is_compiled_again(numbered: Callable[..., bytes], tmp_path: Path) -> None:
    numbered("text", ())
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert [numbered("text", ()) for _ in range(2)] == [b"code 2 of text"] * 2


def test_full_disk_does_not_prevent_compilation(
    numbered: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(partial: Path, path: Path) -> Path:
        raise OSError(ENOSPC, "No space left on device")

    folder.keep("any", b"so that there is a key")
    monkeypatch.setattr(Path, "replace", no_space)
    assert numbered("text", ()) == b"code 1 of text" and [file.name for file in tmp_path.iterdir()] == ["any"]


@pytest.mark.parametrize(
    "capability, architecture",
    [
        ((8, 0), "sm_80"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
        ((12, 9), "compute_121"),
        ((13, 0), "compute_121"),
        ((8, 5), "compute_80"),
        ((7, 0), "compute_70"),
    ],
)
def test_architecture_is_that_of_the_device_or_known_to_nvrtc(
    capability: tuple[int, int], architecture: str, nvrtc: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code for a virtual architecture is PTX, which the driver compiles."""
    monkeypatch.setattr(compiler, "_known_architectures", lambda: KNOWN)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert compiler._architecture(0) == architecture
    assert compiler.lends_registers(0) == (architecture in ("sm_90a", "sm_100a", "sm_120a"))
    vars(nvrtc).update(
        NVRTCError=RuntimeError,
        createProgram=lambda *_: 7,
        compileProgram=lambda *_: None,
        destroyProgram=lambda _: None,
        getPTX=lambda program: f"compute of {program}".encode(),
        getCUBIN=lambda program: f"sm of {program}".encode(),
    )
    code = compiler._machine_code("text", ("--std=c++17", f"--gpu-architecture={architecture}"))
    assert code.decode() == f"{architecture.partition('_')[0]} of 7"


def test_source_text_contains_its_includes() -> None:
    for source in KERNELS.glob("*/*.cu"):
        text, own = compiler._source_text(source), source.read_text()
        assert "#include" in own and "#include" not in text
        assert text.count((KERNELS / "device.cuh").read_text()) == 1, "included by the source or by one of its headers"
        headers = [header.read_text() for header in source.parent.glob("*.cuh") if f'"{header.name}"' in own]
        assert all(line in text for header in headers for line in header.splitlines() if not line.startswith("#include"))


# The CUDA driver.


class FakeDriver:
    """A fake CUDA driver that records launches and tensor maps, and returns `status`."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.maps: list[tuple[Any, ...]] = []
        self.status = 0
        self.cuLaunchKernelEx = self.launch
        self.cuTensorMapEncodeTiled = self.encode
        self.cuOccupancyMaxActiveBlocksPerMultiprocessor = self.count

    def launch(self, config: Any, function: int, arguments: Any, _: None) -> int:
        settings = ctypes.cast(config, ctypes.POINTER(compiler._Config)).contents
        launch = {name: getattr(settings, name) for name in ("shared", "stream")}
        launch |= {"grid": tuple(settings.grid), "block": tuple(settings.block), "function": function}
        launch["attributes"] = {attribute.id: attribute.value[0] for attribute in settings.attributes[: settings.count]}
        first, second = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[:2]
        launch["members"], launch["other"] = struct.unpack("3q", ctypes.string_at(first, 24)), ctypes.string_at(second, 5)
        self.launches.append(launch)
        return self.status

    def encode(self, room: Any, *arguments: Any) -> int:
        self.maps.append(
            tuple(tuple(each) if isinstance(each, ctypes.Array) else getattr(each, "value", each) for each in arguments)
        )
        at = ctypes.cast(room, ctypes.c_void_p).value or 0
        assert at % 64 == 0
        ctypes.memset(at, len(self.maps), tensormap.MAP_BYTES)
        return self.status

    def count(self, found: Any, function: ctypes.c_void_p, threads: int, shared: ctypes.c_size_t) -> int:
        assert (function.value, threads, shared.value) == (1234, 96, 50_176)
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int)).contents.value = 2
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    for module in (compiler, tensormap):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    tensormap.tensor_map.cache_clear()
    return fake


def kernel(**options: bool) -> compiler.Kernel:
    flags = {"cooperative": False, "overlaps": True} | options
    return compiler.Kernel(SimpleNamespace(ptr=1234), device=3, threads=96, cluster=1, **flags)


@pytest.mark.parametrize(
    "cooperative, early, overlaps, attributes",
    [(False, False, True, {}), (True, True, True, {2: 1, 6: 1}), (False, True, False, {})],
)
def test_launch_passes_its_configuration_to_the_driver(
    cooperative: bool, early: bool, overlaps: bool, attributes: dict[int, int], driver: FakeDriver
) -> None:
    launched = kernel(cooperative=cooperative, overlaps=overlaps)
    launched.launch((2, 5, 1), 4096, [0, -1, 2**40], b"\0map\0", early=early)
    expected = {"shared": 4096, "stream": 73, "grid": (2, 5, 1), "block": (96, 1, 1), "function": 1234}
    expected |= {"attributes": attributes, "members": (0, -1, 2**40), "other": b"\0map\0"}
    assert driver.launches == [expected]


def test_tensor_map_is_made_once_with_columns_before_rows(driver: FakeDriver) -> None:
    maps = [tensormap.tensor_map(address, 1000, 24, 64, 32) for address in (4096, 32, 4096)]
    assert maps[0] == maps[2] == b"\1" * tensormap.MAP_BYTES != maps[1]
    assert driver.maps[0] == (1, 2, 4096, (24, 1000), (48,), (32, 64), (1, 1), 0, 3, 2, 0) and len(driver.maps) == 2


def test_driver_errors_raise_or_count_no_blocks(driver: FakeDriver) -> None:
    assert compiler.resident_blocks(kernel(cooperative=True), 50_176) == 2
    driver.status = 719
    assert compiler.resident_blocks(kernel(cooperative=True), 50_176) == 0
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed: CUDA error 719"):
        kernel().launch((1, 1, 1), 0, [1, 2, 3], b"other")
    with pytest.raises(RuntimeError, match=r"10 x 8 matrix at 0x10: CUDA error 719"):
        tensormap.tensor_map(16, 10, 8, 64, 64)
