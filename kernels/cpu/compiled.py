"""Compiles loops with Numba and keeps the machine code in the folder of compiled kernels.

`inner` compiles a function into its callers. `Compiled` is a function that Python calls: its arguments are numbers and
addresses, alone or in tuples, all int64, because Numba would take microseconds to unpack arrays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

import msgspec
from numba import _dynfunc, config, njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import Environment
from numba.core.registry import cpu_target

from kernels.cpu.cache import COMPLETE, KERNELS, LOOPS, code_file
from kernels.cpu.target import Target, host_target
from kernels.folder import cache_folder, keep, read_kept
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


ALL: list[Compiled] = []
"""Every compiled function of the imported modules."""


class Compiled:
    """A function of int64 arguments and of named tuples of them, as it is annotated, compiled at its first call or read from the
    folder. It releases the interpreter lock."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        ALL.append(self)

    def __call__(self, *arguments: int | tuple[int, ...]) -> None:
        self.machine_code(*arguments)

    def compile(self) -> None:
        """Compile the function, or read it from the folder."""
        self.machine_code  # noqa: B018

    @property
    def file(self) -> str:
        """Path of the file with the machine code, within the folder of compiled kernels."""
        return code_file(f"{self._function.__module__}.{self._function.__name__}")

    @cached_property
    def machine_code(self) -> Callable[..., None]:
        kept = read_kept(self.file)
        if kept:
            return _load(kept)
        hints = get_type_hints(self._function)
        del hints["return"]
        signature = types.void(*map(_argument_type, hints.values()))
        (result,) = njit(signature, nogil=True, error_model="numpy")(self._function).overloads.values()
        keep(self.file, _dump(result))
        entry: Callable[..., None] = result.entry_point
        return entry


def _argument_type(hint: Any) -> types.Type:
    """Return Numba's type of an argument with this annotation: int, or a named tuple of int."""
    return types.int64 if hint is int else types.NamedUniTuple(types.int64, len(hint._fields), hint)


def _dump(result: Any) -> bytes:
    """Return the machine code of a function that Numba has compiled. Numba's own cache would write, and read, a pickle."""
    assert not result.environment.consts, "the functions take and return no Python objects"
    code, wrapper = result.library.serialize_using_object_code(), result.fndesc.llvm_cpython_wrapper_name
    return msgspec.msgpack.encode((code, wrapper, result.environment.env_name))


def _load(content: bytes) -> Callable[..., None]:
    """Return the function with this machine code, linked as Numba does it."""
    code, wrapper, variable = msgspec.msgpack.decode(content)
    with global_compiler_lock:
        cpu_target.target_context.refresh()  # the machine code calls Numba's runtime
        library = cpu_target.target_context.codegen().unserialize_library(code)
        environment, address = Environment({}), library.get_pointer_to_function(wrapper)
        library.codegen.set_env(variable, environment)
        function: Callable[..., None] = _dynfunc.make_function(
            sys.modules[__name__], wrapper, "", address, environment, (library,)
        )
    return function


def compile_all() -> None:
    """Compile every loop that is not kept yet for this target. Prints a line for each: it takes minutes."""
    start, folder = time.monotonic(), cache_folder()
    for source in KERNELS.glob(LOOPS):
        import_module(f"kernels.{source.parent.name}.{source.stem}")
    for done, function in enumerate(ALL):
        elapsed = f"{time.monotonic() - start:.0f} s"
        print(f"compiling CPU kernel {done + 1} of {len(ALL)} into {folder}, {elapsed}", file=sys.stderr, flush=True)
        function.compile()
    keep(code_file(COMPLETE), "\n".join(function.file for function in ALL).encode())
