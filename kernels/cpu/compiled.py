"""Compiles loops with Numba and keeps the machine code in the folder of compiled kernels.

`inner` compiles a function into its callers. `Compiled` is a function that Python calls: its arguments are numbers and
addresses, all int64, because Numba would take microseconds to unpack arrays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit, types
from numba.core.caching import UserProvidedCacheLocator
from numba.extending import intrinsic

from kernels.cpu.cache import COMPLETE, KERNELS, LOOPS, code_folder
from kernels.cpu.target import Target, host_target
from kernels.folder import cache_folder
from kernels.ragged import ContractError

Function = TypeVar("Function", bound=Callable[..., Any])
Codegen = Callable[..., Any]


def compiled_target() -> Target:
    """Return the target that this process compiles for. It must be set before the first function is compiled."""
    target = host_target()
    if target is None:
        raise ContractError("the cpu backend needs a processor with AVX2, AVX-512 or NEON")
    config.CPU_NAME, config.CPU_FEATURES = target.name, target.features
    return target


def inner(function: Function) -> Function:
    """Compile a function that compiled functions call."""
    compiled: Function = njit(nogil=True, error_model="numpy")(function)
    return compiled


def llvm_code(function: Callable[..., tuple[Any, Codegen]]) -> Any:
    """Return a function for compiled code that is written in LLVM operations. `function` returns its signature and what emits its code."""
    return intrinsic(function)


ALL: list[Compiled] = []
"""Every compiled function of the imported modules."""


class Compiled:
    """A function of int64 arguments, compiled at its first call or read from the folder. It releases the interpreter lock."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        ALL.append(self)

    def __call__(self, *arguments: int) -> None:
        self.machine_code(*arguments)

    def compile(self) -> None:
        """Compile the function, or read it from the folder."""
        self.machine_code  # noqa: B018

    @cached_property
    def machine_code(self) -> Any:
        signature = types.void(*[types.int64] * self._function.__code__.co_argcount)
        with _kept_in(code_folder()) as is_kept:
            return njit(signature, nogil=True, error_model="numpy", cache=is_kept)(self._function)


class FolderLocator(UserProvidedCacheLocator):  # type: ignore[misc]  # Numba has no types
    """Tells Numba where in a folder the machine code of a function is. Numba's own locators go by the path of the source file, so
    that a second installation would compile again, and they refuse a read-only folder."""

    @classmethod
    def get_suitable_cache_subpath(cls, source: str) -> str:
        return Path(source).parent.name

    def ensure_cache_path(self) -> None:
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)


@contextmanager
def _kept_in(folder: Path | None) -> Iterator[bool]:
    """Let Numba keep machine code in this folder. Yields whether it can: the folder is there, or can be made."""
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR = str(folder)
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{FolderLocator.__name__}"
    try:
        yield folder is not None and (folder.exists() or cache_folder() is not None)
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


def compile_all(folder: Path) -> None:
    """Compile every loop that is not in the folder of this target yet. Prints a line for each: it takes minutes."""
    start = time.monotonic()
    for source in KERNELS.glob(LOOPS):
        import_module(f"kernels.{source.parent.name}.{source.stem}")
    for done, function in enumerate(ALL):
        elapsed = f"{time.monotonic() - start:.0f} s"
        print(f"compiling CPU kernel {done + 1} of {len(ALL)} into {folder}, {elapsed}", file=sys.stderr, flush=True)
        function.compile()
    (folder / COMPLETE).touch()
