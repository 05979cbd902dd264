"""CUDA source to a kernel that can be launched: NVRTC and the driver through CuPy, and what is compiled kept on disk and in memory.

CuPy is an optional package, imported when the first kernel is compiled. Memory is torch's: kernels are given addresses only.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from struct import Struct
from typing import Any

import torch

CACHE, DEFAULT_CACHE = "SEQSERVE_CACHE", "~/.cache/seqserve"
"""The variable that names the folder in which compiled kernels are kept, and the folder when it is not set."""

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
"""Attributes of a function and of a launch, as CUDA's driver numbers them."""
PORTABLE_CLUSTER = 8
"""Blocks that a cluster may have everywhere."""
MOST_CONFIGS = 4096
"""That are kept."""
DIGEST_BYTES = 32
"""Of SHA-256, before the code in a file of the folder."""


class CompileError(RuntimeError):
    """A kernel does not compile, or not for this device; the message is the compiler's."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel on one device, which is the current one when it is launched, in blocks of `threads` threads."""

    function: Any
    device: int
    threads: int
    cluster: int
    cooperative: bool

    def launch(
        self, blocks: tuple[int, int, int], shared: int, members: Sequence[int], *others: bytes, early: bool = False
    ) -> None:
        """On torch's stream; raises RuntimeError when the device refuses.

        blocks: along each axis of the grid; shared: bytes for each block; members: those of its first argument, a structure, eight bytes
        each; others: arguments after it; early: the kernel waits by itself for those before it in the stream (griddepcontrol.wait), and
        may begin while they run.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # the public way takes 5 us longer
        config = _config(blocks, self.threads, shared, stream, self.cooperative, early)
        arguments = (ctypes.c_char_p * (1 + len(others)))(_packer(len(members))(*members), *others)
        status = driver().cuLaunchKernelEx(config, self.function.ptr, arguments, None)
        if status:
            raise RuntimeError(f"the kernel was not launched: CUDA error {status}")


def installed() -> bool:
    return find_spec("cupy") is not None


@cache
def compiled(
    source: Path, device: int, *, threads: int, cluster: int = 1, cooperative: bool = False, **constants: int
) -> Kernel:
    """The kernel of a source file, which is named as the file's folder, specialised by its constants; raises CompileError.

    The first call on a machine takes half a second or so; later ones find the result in the folder of compiled kernels.
    """
    import cupy
    from cupy.cuda import driver
    from cupy.cuda.function import Module

    defined = [f"--define-macro={name}={value}" for name, value in {"THREADS": threads, **constants}.items()]
    options = ("--std=c++17", "--ftz=true", f"--gpu-architecture={_architecture(device)}", *defined)
    with cupy.cuda.Device(device):
        module = Module()
        try:
            module.load(_kept(_text(source), options))
            function = module.get_function(source.parent.name)
            driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_limit(device))
            if cluster > PORTABLE_CLUSTER:
                driver.funcSetAttribute(function.ptr, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        except (CompileError, driver.CUDADriverError) as error:
            raise CompileError(f"{source.name} with {constants}: {error}") from error
    return Kernel(function, device, threads, cluster, cooperative)


def shared_limit(device: int) -> int:
    """Bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types do not name them all
    return int(properties.shared_memory_per_block_optin)


def registers(threads: int) -> int:
    """How many registers a thread has in a block that is alone on its multiprocessor."""
    return min(255, 65536 // threads // 8 * 8)


def lends_registers(device: int) -> bool:
    """Whether warps can give registers up that others of their block take."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def resident_clusters(kernel: Kernel, shared: int) -> int:
    """How many clusters of this kernel its device holds at once; 0 when it can hold none, or knows no clusters."""
    config = _with_attributes((kernel.cluster, 1, 1), kernel.threads, shared, None, {CLUSTER_DIMENSION: (kernel.cluster, 1, 1)})
    found = ctypes.c_int()
    with torch.cuda.device(kernel.device):
        status = driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), ctypes.c_void_p(kernel.function.ptr), config)
    return 0 if status else found.value


@cache
def driver() -> ctypes.CDLL:
    """CUDA's, whose functions return 0 or the number of an error."""
    found = ctypes.CDLL("libcuda.so.1")
    found.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return found


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


def _text(source: Path) -> str:
    """The source with what it includes, by paths from its folder, as whether it was compiled before is told by its text."""
    return re.sub(r'#include "([\w/.]+\.cuh)"', lambda found: _text(source.parent / found[1]), source.read_text())


def keep_in(folder: Path) -> None:
    """Keep what is compiled from now on in this folder."""
    os.environ[CACHE] = str(folder)


def folder() -> Path | None:
    """Where compiled kernels are kept: what SEQSERVE_CACHE names, made if need be; None if that cannot be written."""
    try:
        wanted = Path(os.environ.get(CACHE, DEFAULT_CACHE)).expanduser()
        wanted.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter where this user has no home
        return None
    return wanted if os.access(wanted, os.W_OK) else None


def _architecture(device: int) -> str:
    """With all that this very architecture has, such as registers that move from one warp to another."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _kept(text: str, options: Sequence[str]) -> bytes:
    """The machine code of a source, from the folder if it is there and whole, and put there if not."""
    from cupy.cuda import nvrtc

    found = folder()
    if found is None:
        return _machine_code(text, options)
    of = "\0".join((str(nvrtc.getVersion()), *options, text))
    path = found / f"{hashlib.sha256(of.encode()).hexdigest()}.cubin"
    digest, code = (kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]) if (kept := _read(path)) else (b"", b"")
    if not code or digest != hashlib.sha256(code).digest():
        code = _machine_code(text, options)
        _keep(hashlib.sha256(code).digest() + code, path)
    return code


def _keep(kept: bytes, path: Path) -> None:
    """Where there is no room, this start goes on, and the next one compiles again."""
    written = path.with_suffix(f".{os.getpid()}")
    try:
        written.write_bytes(kept)
        written.replace(path)
    except OSError:
        with suppress(OSError):
            written.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _machine_code(text: str, options: Sequence[str]) -> bytes:
    """What NVRTC makes of it; raises CompileError with what it says."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise CompileError(nvrtc.getProgramLog(program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)


@lru_cache(MOST_CONFIGS)
def _config(blocks: tuple[int, int, int], threads: int, shared: int, stream: int, cooperative: bool, early: bool) -> Any:
    """What a launch is told, made once: nothing of it changes."""
    attributes = {COOPERATIVE: cooperative, PROGRAMMATIC_STREAM_SERIALIZATION: early}
    return _with_attributes(blocks, threads, shared, stream, {name: (1,) for name, wanted in attributes.items() if wanted})


def _with_attributes(
    blocks: tuple[int, int, int], threads: int, shared: int, stream: int | None, attributes: Mapping[int, tuple[int, ...]]
) -> Any:
    listed = (_Attribute * len(attributes))(*(_Attribute(name, value=value) for name, value in attributes.items()))
    return ctypes.byref(_Config(blocks, (threads, 1, 1), shared, stream, listed, len(attributes)))


@cache
def _packer(members: int) -> Callable[..., bytes]:
    return Struct(f"{members}q").pack
