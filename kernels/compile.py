"""Compiles CUDA sources with NVRTC, keeps the machine code on disk and in memory, and launches kernels through the driver.

CuPy is an optional package, imported when the first kernel is compiled. It allocates nothing: kernels receive the addresses of torch's
arrays.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from struct import Struct
from typing import Any

import torch

from kernels.folder import keep, read_kept

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
"""The CUDA driver's numbers of function and launch attributes."""
PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every device supports."""
MAX_CACHED_CONFIGS = 4096
VIRTUAL = "compute_"
"""The beginning of the names of virtual architectures."""


class CompileError(RuntimeError):
    """A kernel does not compile for this device. The message contains the compiler's log."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel on one device, which must be the current device at a launch. A block has `threads` threads.

    overlaps: the device can start kernels while earlier kernels run.
    """

    function: Any
    device: int
    threads: int
    cluster: int
    cooperative: bool
    overlaps: bool

    def launch(
        self, blocks: tuple[int, int, int], shared: int, members: Sequence[int], *arguments: bytes, early: bool = False
    ) -> None:
        """Launch the kernel on torch's stream; raises RuntimeError when the driver refuses.

        blocks: along each axis of the grid; shared: bytes of shared memory of a block; members: of the first argument, a structure with
        members of eight bytes; arguments: the remaining arguments; early: the kernel may start while earlier kernels of the
        stream run, and waits for them itself (griddepcontrol.wait). It makes no difference on a device without overlapping kernels.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # the public function takes 5 us longer
        config = _config(blocks, self.threads, shared, stream, self.cooperative, early and self.overlaps)
        packed = (ctypes.c_char_p * (1 + len(arguments)))(_packer(len(members))(*members), *arguments)
        status = driver().cuLaunchKernelEx(config, self.function.ptr, packed, None)
        if status:
            raise RuntimeError(f"cuLaunchKernelEx failed: CUDA error {status}")


def cupy_installed() -> bool:
    return find_spec("cupy") is not None


@cache
def load_kernel(
    source: Path, device: int, *, threads: int, cluster: int = 1, cooperative: bool = False, **constants: int
) -> Kernel:
    """Return the kernel of a source file, specialised by constants; raises CompileError. The kernel has the name of the file's folder.

    The first call on a machine compiles for about half a second; later processes read the result from the folder of compiled kernels.
    """
    import cupy
    from cupy.cuda import driver
    from cupy.cuda.function import Module

    macros = [f"--define-macro={name}={value}" for name, value in {"THREADS": threads, **constants}.items()]
    options = ("--std=c++17", "--ftz=true", f"--gpu-architecture={_architecture(device)}", *macros)
    with cupy.cuda.Device(device):
        module = Module()
        try:
            module.load(_load_or_compile(_source_text(source), options))
            function = module.get_function(source.parent.name)
            driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_limit(device))
            if cluster > PORTABLE_CLUSTER:
                driver.funcSetAttribute(function.ptr, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        except (CompileError, driver.CUDADriverError) as error:
            raise CompileError(f"{source.name} with {constants}: {error}") from error
    return Kernel(function, device, threads, cluster, cooperative, overlaps=is_hopper_or_newer(device))


def shared_limit(device: int) -> int:
    """Return the bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack some device properties
    return int(properties.shared_memory_per_block_optin)


def registers(threads: int) -> int:
    """Return the maximum registers of a thread if a multiprocessor runs this many threads.

    Each quarter of a multiprocessor has a quarter of the registers, and its warps are a quarter of all warps, rounded up.
    """
    rounded = -(-threads // 128) * 128
    return min(255, 65536 // rounded // 8 * 8)


def is_hopper_or_newer(device: int) -> bool:
    """Return whether the device has thread-block clusters and starts kernels early: compute capability 9.0 or higher."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def lends_registers(device: int) -> bool:
    """Return whether warps can release registers for other warps of their block, which needs code of exactly this architecture."""
    return _architecture(device).endswith("a")


def resident_clusters(kernel: Kernel, shared: int) -> int:
    """Return how many clusters of this kernel run at once; 0 if none fits or the device has no clusters."""
    config = _with_attributes((kernel.cluster, 1, 1), kernel.threads, shared, None, {CLUSTER_DIMENSION: (kernel.cluster, 1, 1)})
    clusters = ctypes.c_int()
    with torch.cuda.device(kernel.device):
        status = driver().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), ctypes.c_void_p(kernel.function.ptr), config)
    return 0 if status else clusters.value


def resident_blocks(kernel: Kernel, shared: int) -> int:
    """Return how many blocks of this kernel one multiprocessor runs at once, with its registers, its shared memory and its threads."""
    blocks = ctypes.c_int()
    function, size = ctypes.c_void_p(kernel.function.ptr), ctypes.c_size_t(shared)
    with torch.cuda.device(kernel.device):
        status = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(blocks), function, kernel.threads, size)
    return 0 if status else blocks.value


@cache
def driver() -> ctypes.CDLL:
    """Return the CUDA driver's library. Its functions return 0 or an error number."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def _source_text(source: Path) -> str:
    """Return a source with its includes inserted. Includes name paths relative to their file. The text identifies compiled code."""
    return re.sub(r'#include "([\w/.]+\.cuh)"', lambda match: _source_text(source.parent / match[1]), source.read_text())


def _architecture(device: int) -> str:
    """Return the device's architecture, with features of exactly this architecture, such as warps that lend registers.

    For a device that NVRTC does not know, return the virtual architecture of the newest device before it. The driver compiles that code.
    """
    major, minor = torch.cuda.get_device_capability(device)
    number, known = 10 * major + minor, _known_architectures()
    if number in known:
        return f"sm_{number}{'a' if major >= 9 else ''}"
    return f"{VIRTUAL}{max((other for other in known if other < number), default=number)}"


@cache
def _known_architectures() -> tuple[int, ...]:
    """Return the architectures that NVRTC compiles for, such as 90 for compute capability 9.0."""
    from cupy.cuda import nvrtc

    return tuple(nvrtc.getSupportedArchs())


def _load_or_compile(text: str, options: Sequence[str]) -> bytes:
    """Return the code of a source: from the folder, or compiled and written there if the file is missing or damaged."""
    from cupy.cuda import nvrtc

    source = "\0".join((str(nvrtc.getVersion()), *options, text))
    name = f"{hashlib.sha256(source.encode()).hexdigest()}.cubin"
    code = read_kept(name)
    if not code:
        code = _machine_code(text, options)
        keep(name, code)
    return code


def _machine_code(text: str, options: Sequence[str]) -> bytes:
    """Compile with NVRTC: to machine code, or to PTX for a virtual architecture. Raises CompileError with NVRTC's log."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        is_virtual = any(option.startswith(f"--gpu-architecture={VIRTUAL}") for option in options)
        return bytes(nvrtc.getPTX(program) if is_virtual else nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise CompileError(nvrtc.getProgramLog(program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)


@lru_cache(MAX_CACHED_CONFIGS)
def _config(blocks: tuple[int, int, int], threads: int, shared: int, stream: int, cooperative: bool, early: bool) -> Any:
    """Return the configuration of a launch. Equal launches share one, which nothing changes."""
    attributes = {COOPERATIVE: cooperative, PROGRAMMATIC_STREAM_SERIALIZATION: early}
    return _with_attributes(blocks, threads, shared, stream, {name: (1,) for name, enabled in attributes.items() if enabled})


def _with_attributes(
    blocks: tuple[int, int, int], threads: int, shared: int, stream: int | None, attributes: Mapping[int, tuple[int, ...]]
) -> Any:
    array = (_Attribute * len(attributes))(*(_Attribute(name, value=value) for name, value in attributes.items()))
    return ctypes.byref(_Config(blocks, (threads, 1, 1), shared, stream, array, len(attributes)))


@cache
def _packer(members: int) -> Callable[..., bytes]:
    return Struct(f"{members}q").pack
