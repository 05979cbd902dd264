"""Compiles CUDA sources with NVRTC, which needs no GPU, and reads what the assembler reports about a kernel."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from kernels.compile import CompileError, _source_text
from tests.kernels.devices import FakeKernel

PACKAGE = "nvidia-cuda-nvrtc"
MAX_SPILLED_BYTES = 352
"""Some kernels are fastest on Hopper with a few values in memory. The most for any device here is in `gate_inputs.cu` on an A100, and
depends on the compiler: 288 bytes with NVRTC 13.0, 300 with 13.2 and 13.4, and 348 with 13.5. With 13.5 it is 316 bytes on GPUs of
compute capability 8.6 and 8.9, 252 on an H100, 92 on a B200, and 80 on an RTX 5090."""
FOLDER, LIBRARY, BUILTINS = "cu13/lib", "libnvrtc.so.13", "libnvrtc-builtins.so.13.*"


class Report(NamedTuple):
    """Registers of a thread, and bytes that a thread stores to memory for want of registers."""

    registers: int
    spilled_bytes: int


@cache
def library() -> ctypes.CDLL | None:
    """Return NVRTC from its package, or None. It finds its built-in functions only if they are loaded already."""
    found = find_spec("nvidia")
    for folder in [] if found is None else found.submodule_search_locations or []:
        library, builtins = Path(folder, FOLDER, LIBRARY), sorted(Path(folder, FOLDER).glob(BUILTINS))
        if library.exists() and builtins:
            ctypes.CDLL(str(builtins[0]), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    return None


def required_library() -> ctypes.CDLL:
    """Return NVRTC; skips the test if it is not installed."""
    found = library()
    if found is None:
        pytest.skip(f"NVRTC is missing: install the Python package {PACKAGE}")
    return found


def assert_fits_registers(kernel: FakeKernel) -> None:
    """Compile a kernel for its device, and assert that a thread needs no more registers than the launch leaves it."""
    report = assemble(kernel)
    assert report.registers <= kernel.max_registers, (kernel, report)
    assert report.spilled_bytes <= MAX_SPILLED_BYTES, (kernel, report)


def assemble(kernel: FakeKernel, architecture: str | None = None) -> Report:
    """Compile a kernel with its constants for an architecture, that of its device by default; raises CompileError with NVRTC's log."""
    nvrtc, program = required_library(), ctypes.c_void_p()
    macros = {"THREADS": kernel.threads, **kernel.constants}
    options = [
        *(
            "--std=c++17",
            "--ftz=true",
            "--ptxas-options=-v",
            f"--gpu-architecture={architecture or kernel.device.architecture}",
        ),
        *(f"--define-macro={name}={value}" for name, value in macros.items()),
    ]
    text = _source_text(kernel.source).encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None) == 0
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        log = _log(nvrtc, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        raise CompileError(log)
    used, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert used is not None and spilled is not None, log
    return Report(int(used[1]), int(spilled[1]))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, room)
    return room.value.decode(errors="replace")
