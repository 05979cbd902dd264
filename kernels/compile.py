"""CUDA source to a kernel that can be launched: NVRTC through CuPy, and what it compiles kept on disk and in memory.

CuPy is an optional package, imported when the first kernel is compiled. Memory is torch's: kernels are given addresses only.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import torch

CACHE, DEFAULT_CACHE = "SEQSERVE_CACHE", "~/.cache/seqserve"
"""The variable that names the folder in which compiled kernels are kept, and the folder when it is not set."""

NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
CLUSTER_DIMENSION = 4
"""Attributes of a function and of a launch, as CUDA's driver numbers them."""
PORTABLE_CLUSTER = 8
"""Blocks that a cluster may have everywhere."""


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

    def launch(self, blocks: int, shared: int, members: Sequence[int]) -> None:
        """On torch's stream. shared: bytes for each block; members: those of its one argument, a structure, eight bytes each."""
        layout = _layout(len(members))
        call = np.frombuffer(layout.pack(*members), dtype=f"V{layout.size}")  # CuPy passes an array of one element by value
        stream = _stream(torch._C._cuda_getCurrentRawStream(self.device))  # the public way takes 5 us longer
        self.function((blocks,), (self.threads,), (call,), shared, stream, self.cooperative)


def installed() -> bool:
    return find_spec("cupy") is not None


@cache
def compiled(
    source: Path, device: int, *, threads: int, cluster: int = 1, cooperative: bool = False, **constants: int
) -> Kernel:
    """The kernel of a source file, which is named as the file's folder, specialised by its constants; raises CompileError.

    The first call on a machine takes half a second or so; later ones find the result in the folder of compiled kernels.
    """
    _tell_cupy()
    import cupy
    from cupy.cuda import driver

    options = ("--std=c++17", *(f"-D{name}={value}" for name, value in {"THREADS": threads, **constants}.items()))
    with cupy.cuda.Device(device):
        try:
            kernel = cupy.RawKernel(_text(source), source.parent.name, options, enable_cooperative_groups=cooperative)
            kernel.max_dynamic_shared_size_bytes = shared_limit(device)
            if cluster > PORTABLE_CLUSTER:
                driver.funcSetAttribute(kernel.kernel.ptr, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        except (cupy.cuda.compiler.CompileException, driver.CUDADriverError) as error:
            raise CompileError(f"{source.name} with {constants}: {error}") from error
    return Kernel(kernel.kernel, device, threads, cluster, cooperative)


def shared_limit(device: int) -> int:
    """Bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types do not name them all
    return int(properties.shared_memory_per_block_optin)


def registers(threads: int) -> int:
    """How many registers a thread has in a block that is alone on its multiprocessor."""
    return min(255, 65536 // threads // 8 * 8)


def resident_clusters(kernel: Kernel, shared: int) -> int:
    """How many clusters of this kernel its device holds at once; 0 when it can hold none, or knows no clusters."""
    attribute = _Attribute(CLUSTER_DIMENSION, value=(ctypes.c_uint * 16)(kernel.cluster, 1, 1))
    config = _Config((kernel.cluster, 1, 1), (kernel.threads, 1, 1), shared, None, ctypes.pointer(attribute), 1)
    found = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(kernel.device):
        status = driver.cuOccupancyMaxActiveClusters(
            ctypes.byref(found), ctypes.c_void_p(kernel.function.ptr), ctypes.byref(config)
        )
    return 0 if status else found.value


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
    """The source with what it includes from beside it, as whether it was compiled before is told by its text."""
    return re.sub(r'#include "(\w+\.cuh)"', lambda found: (source.parent / found[1]).read_text(), source.read_text())


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


def _tell_cupy() -> None:
    """Where it keeps what it compiles: in our folder, or, when there is none, in memory alone."""
    found = folder()
    if found is None:
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    else:
        os.environ.setdefault("CUPY_CACHE_DIR", str(found))


@dataclass(frozen=True, slots=True)
class _Stream:
    """What CuPy asks of a stream."""

    ptr: int


_stream = cache(_Stream)


@cache
def _layout(members: int) -> Struct:
    return Struct(f"{members}q")
