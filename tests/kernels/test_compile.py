"""Tests of compilation, of the folder of compiled kernels, and of launches."""

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
from kernels import folder
from service.settings import Settings

KERNELS = Path(compiler.__file__).parent
SOURCES = sorted(KERNELS.glob("*/*.cu"))


def test_environment_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path / "new" / "kernels"))
    assert folder.cache_folder() == tmp_path / "new" / "kernels"
    assert (tmp_path / "new" / "kernels").is_dir()


def test_default_folder_is_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEQSERVE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder.cache_folder() == tmp_path / ".cache" / "seqserve"


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace NVRTC by a compiler that numbers its results."""
    numbers = count(1)
    cupy, cuda, nvrtc = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nvrtc")
    vars(nvrtc)["getVersion"] = lambda: (13, 0)
    vars(cuda)["nvrtc"] = nvrtc
    for module in (cupy, cuda, nvrtc):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compiler, "_machine_code", lambda text, _: f"code {next(numbers)} of {text}".encode())


@pytest.mark.usefixtures("nvrtc")
def test_kernel_is_compiled_once_per_text_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    assert [compiler._load_or_compile("text", options) for options in (("one",), ("one",), ("two",), ("one",))] == [
        b"code 1 of text",
        b"code 1 of text",
        b"code 2 of text",
        b"code 1 of text",
    ]
    assert compiler._load_or_compile("other", ("one",)) == b"code 3 of other"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("harm", [lambda kept: kept[:0], lambda kept: kept[:40], lambda kept: kept[:-1] + b"!"])
def test_damaged_file_is_compiled_again(
    harm: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    compiler._load_or_compile("text", ())
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(harm(kept.read_bytes()))
    assert compiler._load_or_compile("text", ()) == b"code 2 of text"
    assert compiler._load_or_compile("text", ()) == b"code 2 of text"


@pytest.mark.parametrize(
    "capability, architecture",
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
        ((12, 9), "compute_121"),
        ((13, 0), "compute_121"),
        ((8, 8), "compute_87"),
        ((7, 0), "compute_70"),
    ],
)
def test_architecture_is_that_of_the_device_or_known_to_nvrtc(
    capability: tuple[int, int], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
    monkeypatch.setattr(compiler, "_known_architectures", lambda: known)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert compiler._architecture(0) == architecture
    assert compiler.lends_registers(0) == (architecture in ("sm_90a", "sm_100a", "sm_120a"))


@pytest.mark.parametrize(("architecture", "code"), [("sm_90a", b"cubin of 7"), ("compute_121", b"ptx of 7")])
def test_virtual_architecture_gives_code_for_the_driver(
    architecture: str, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy, cuda, nvrtc = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nvrtc")
    vars(nvrtc).update(
        NVRTCError=RuntimeError,
        createProgram=lambda *_: 7,
        compileProgram=lambda *_: None,
        destroyProgram=lambda _: None,
        getPTX=lambda program: f"ptx of {program}".encode(),
        getCUBIN=lambda program: f"cubin of {program}".encode(),
    )
    vars(cuda)["nvrtc"] = nvrtc
    for module in (cupy, cuda, nvrtc):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert compiler._machine_code("text", ("--std=c++17", f"--gpu-architecture={architecture}")) == code


@pytest.mark.usefixtures("nvrtc")
def test_kernels_compile_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path / "file" / "kernels"))
    assert folder.cache_folder() is None
    assert compiler._load_or_compile("text", ()) == b"code 1 of text"
    assert compiler._load_or_compile("text", ()) == b"code 2 of text"


@pytest.mark.usefixtures("nvrtc")
def test_full_disk_does_not_prevent_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some(path: Path, kept: bytes) -> int:
        with path.open("wb") as file:
            file.write(kept[:3])
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", write_some)
    assert compiler._load_or_compile("text", ()) == b"code 1 of text"
    assert not list(tmp_path.iterdir())


def test_read_only_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert folder.cache_folder() is None


def test_service_and_kernels_have_the_same_default_folder() -> None:
    assert Settings().cache == Path(folder.DEFAULT_CACHE)


def test_set_cache_folder_overrides_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", "elsewhere")
    folder.set_cache_folder(tmp_path)
    assert folder.cache_folder() == tmp_path


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.parent.name}/{source.name}")
def test_source_text_contains_its_includes(source: Path) -> None:
    text = compiler._source_text(source)
    assert "#include" in source.read_text()
    assert "#include" not in text
    assert text.count((KERNELS / "device.cuh").read_text()) == 1, "included by the source or by one of its headers"
    headers = [header.read_text() for header in source.parent.glob("*.cuh") if f'"{header.name}"' in source.read_text()]
    assert all(line in text for header in headers for line in header.splitlines() if not line.startswith("#include"))


def test_registers_are_shared_by_the_threads_of_a_block() -> None:
    assert [compiler.registers(threads) for threads in (64, 256, 320, 384, 448, 512, 1024)] == [
        255,
        255,
        168,
        168,
        128,
        128,
        64,
    ]


# Launches.


class FakeLaunchDriver:
    """A fake CUDA driver that records launches and returns `status`."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.status = 0
        self.cuLaunchKernelEx = self.launch

    def launch(self, config: Any, function: int, arguments: Any, _: None) -> int:
        settings = ctypes.cast(config, ctypes.POINTER(compiler._Config)).contents
        launch = {name: getattr(settings, name) for name in ("shared", "stream")}
        launch |= {"grid": tuple(settings.grid), "block": tuple(settings.block), "function": function}
        launch["attributes"] = {attribute.id: attribute.value[0] for attribute in settings.attributes[: settings.count]}
        first, second = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[:2]
        launch["members"], launch["other"] = struct.unpack("3q", ctypes.string_at(first, 24)), ctypes.string_at(second, 5)
        self.launches.append(launch)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeLaunchDriver:
    fake = FakeLaunchDriver()
    monkeypatch.setattr(compiler, "driver", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    return fake


@pytest.mark.parametrize(
    "cooperative, early, overlaps, attributes",
    [
        (False, False, True, {}),
        (True, False, True, {2: 1}),
        (False, True, True, {6: 1}),
        (True, True, True, {2: 1, 6: 1}),
        (False, True, False, {}),
    ],
)
def test_launch_passes_its_configuration_to_the_driver(
    cooperative: bool, early: bool, overlaps: bool, attributes: dict[int, int], driver: FakeLaunchDriver
) -> None:
    kernel = compiler.Kernel(
        SimpleNamespace(ptr=1234), device=3, threads=96, cluster=1, cooperative=cooperative, overlaps=overlaps
    )
    kernel.launch((2, 5, 1), 4096, [0, -1, 2**40], b"\0map\0", early=early)
    assert driver.launches == [
        {
            "shared": 4096,
            "stream": 73,
            "grid": (2, 5, 1),
            "block": (96, 1, 1),
            "function": 1234,
            "attributes": attributes,
            "members": (0, -1, 2**40),
            "other": b"\0map\0",
        }
    ]


def test_driver_error_raises(driver: FakeLaunchDriver) -> None:
    driver.status = 719
    kernel = compiler.Kernel(SimpleNamespace(ptr=1234), device=0, threads=32, cluster=1, cooperative=False, overlaps=True)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed: CUDA error 719"):
        kernel.launch((1, 1, 1), 0, [1, 2, 3], b"other")


@pytest.mark.parametrize(("status", "blocks"), [(0, 2), (1, 0)])
def test_driver_counts_resident_blocks(status: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(found: Any, function: ctypes.c_void_p, threads: int, shared: ctypes.c_size_t) -> int:
        assert (function.value, threads, shared.value) == (1234, 256, 50_176)
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int)).contents.value = 2
        return status

    fake = SimpleNamespace(cuOccupancyMaxActiveBlocksPerMultiprocessor=count)
    monkeypatch.setattr(compiler, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    kernel = compiler.Kernel(SimpleNamespace(ptr=1234), device=0, threads=256, cluster=1, cooperative=True, overlaps=True)
    assert compiler.resident_blocks(kernel, 50_176) == blocks
