"""Where the machine code of compiled loops is kept, and whether it is complete.

Imports neither Numba nor torch, which take half a second and more.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.cpu.target import host_target
from kernels.folder import cache_folder, read_kept

if TYPE_CHECKING:
    from kernels.backend import Problem

KERNELS = Path(__file__).resolve().parents[1]
LOOPS = "*/cpu_loops.py"
SOURCES = ("cpu/*.py", "scan/forms.py", LOOPS)
NOT_COMPILED = "not compiled for this processor: run `python -m kernels.cpu`"
COMPLETE = "complete"
"""The file that is written when every function is compiled, with the names of their files."""


def refuses(problem: Problem) -> str | None:
    """`Backend.refuses` of the CPU backends."""
    return "runs on a CPU only" if problem.device.type != "cpu" else missing()


def missing() -> str | None:
    """Return why compiled loops cannot run without a pause, or None."""
    if find_spec("numba") is None:
        return "Numba is not installed"
    if host_target() is None:
        return "needs a processor with AVX2, AVX-512 or NEON"
    names = read_kept(code_file(COMPLETE)).decode().split()
    if names and all(map(read_kept, names)):
        return None
    if cache_folder() is None:
        return "the folder of compiled kernels cannot be written, or belongs to another user: set SEQSERVE_CACHE"
    return NOT_COMPILED


def code_file(name: str) -> str:
    """Return the path within the folder of compiled kernels of a file for these sources and this processor, which has a target."""
    target = host_target()
    assert target is not None
    return f"cpu-{target.name}-{_digest()}/{name}"


@cache
def _digest() -> str:
    """Return a digest of everything that the machine code depends on besides the target."""
    parts = [platform.python_version(), sys.platform, *(metadata.version(package) for package in ("numba", "llvmlite"))]
    files = sorted(file for pattern in SOURCES for file in KERNELS.glob(pattern))
    parts += [file.read_text() for file in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
