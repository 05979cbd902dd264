"""Where compiled kernels are kept, and what is compiled."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from errno import ENOSPC
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import compile as compiler
from service.settings import Settings

KERNELS = Path(compiler.__file__).parent
SOURCES = sorted(KERNELS.glob("*/*.cu"))


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path / "new" / "kernels"))
    assert compiler.folder() == tmp_path / "new" / "kernels"
    assert (tmp_path / "new" / "kernels").is_dir()


def test_without_it_the_folder_is_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEQSERVE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.folder() == tmp_path / ".cache" / "seqserve"


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers what it compiles."""
    numbers = count(1)
    cupy, cuda, nvrtc = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nvrtc")
    vars(nvrtc)["getVersion"] = lambda: (13, 0)
    vars(cuda)["nvrtc"] = nvrtc
    for module in (cupy, cuda, nvrtc):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compiler, "_machine_code", lambda text, _: f"code {next(numbers)} of {text}".encode())


@pytest.mark.usefixtures("nvrtc")
def test_a_kernel_is_compiled_once_for_each_text_and_each_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    assert [compiler._kept("text", options) for options in (("one",), ("one",), ("two",), ("one",))] == [
        b"code 1 of text",
        b"code 1 of text",
        b"code 2 of text",
        b"code 1 of text",
    ]
    assert compiler._kept("other", ("one",)) == b"code 3 of other"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("harm", [lambda kept: kept[:0], lambda kept: kept[:40], lambda kept: kept[:-1] + b"!"])
def test_what_is_kept_is_compiled_again_when_it_is_not_whole(
    harm: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    compiler._kept("text", ())
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(harm(kept.read_bytes()))
    assert compiler._kept("text", ()) == b"code 2 of text"
    assert compiler._kept("text", ()) == b"code 2 of text"


@pytest.mark.parametrize(
    "capability, architecture", [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")]
)
def test_the_architecture_is_the_device_s_own(
    capability: tuple[int, int], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert compiler._architecture(0) == architecture
    assert compiler.lends_registers(0) == (capability >= (9, 0))


@pytest.mark.usefixtures("nvrtc")
def test_kernels_are_kept_in_memory_where_no_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path / "file" / "kernels"))
    assert compiler.folder() is None
    assert compiler._kept("text", ()) == b"code 1 of text"
    assert compiler._kept("text", ()) == b"code 2 of text"


@pytest.mark.usefixtures("nvrtc")
def test_a_full_disk_is_no_reason_not_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some(path: Path, kept: bytes) -> int:
        with path.open("wb") as file:
            file.write(kept[:3])
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", write_some)
    assert compiler._kept("text", ()) == b"code 1 of text"
    assert not list(tmp_path.iterdir())


def test_kernels_are_kept_in_memory_where_the_folder_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert compiler.folder() is None


def test_the_service_and_the_kernels_mean_the_same_folder_when_none_is_named() -> None:
    assert Settings().cache == Path(compiler.DEFAULT_CACHE)


def test_the_service_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", "elsewhere")
    compiler.keep_in(tmp_path)
    assert compiler.folder() == tmp_path


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.parent.name}/{source.name}")
def test_a_source_is_compiled_with_what_it_includes(source: Path) -> None:
    text = compiler._text(source)
    assert "#include" in source.read_text()
    assert "#include" not in text
    assert text.count((KERNELS / "device.cuh").read_text()) == 1, "which a source includes, or what it includes does"
    own = [header.read_text() for header in source.parent.glob("*.cuh")]
    assert all(line in text for header in own for line in header.splitlines() if not line.startswith("#include"))


def test_every_thread_of_a_block_has_its_share_of_the_registers() -> None:
    assert [compiler.registers(threads) for threads in (64, 256, 320, 384, 512, 1024)] == [255, 255, 200, 168, 128, 64]


# Launches.


class Driver:
    """Stands for CUDA's: what kernels were launched with, and what it answers."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.status = 0
        self.cuLaunchKernelEx = self.launch

    def launch(self, config: Any, function: int, arguments: Any, _: None) -> int:
        told = ctypes.cast(config, ctypes.POINTER(compiler._Config)).contents
        launch = {name: getattr(told, name) for name in ("shared", "stream")}
        launch |= {"grid": tuple(told.grid), "block": tuple(told.block), "function": function}
        launch["attributes"] = {one.id: one.value[0] for one in told.attributes[: told.count]}
        first, second = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[:2]
        launch["members"], launch["other"] = struct.unpack("3q", ctypes.string_at(first, 24)), ctypes.string_at(second, 5)
        self.launches.append(launch)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(compiler, "driver", lambda: found)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    return found


@pytest.mark.parametrize(
    "cooperative, early, attributes",
    [(False, False, {}), (True, False, {2: 1}), (False, True, {6: 1}), (True, True, {2: 1, 6: 1})],
)
def test_a_launch_tells_the_driver_all(cooperative: bool, early: bool, attributes: dict[int, int], driver: Driver) -> None:
    kernel = compiler.Kernel(SimpleNamespace(ptr=1234), device=3, threads=96, cluster=1, cooperative=cooperative)
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


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    driver.status = 719
    kernel = compiler.Kernel(SimpleNamespace(ptr=1234), device=0, threads=32, cluster=1, cooperative=False)
    with pytest.raises(RuntimeError, match="not launched: CUDA error 719"):
        kernel.launch((1, 1, 1), 0, [1, 2, 3], b"other")
