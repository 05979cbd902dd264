"""Compiled loops that run one step after the other on a device, and measure each in cycles of the processor's clock. Imports Numba.

Each loop writes the cycles of its steps to `measured`, (steps,) int64, and returns how many steps were answered in time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from kernels.compile import driver

LOST = 1 << 28
"""Polls after which an answer is not awaited any longer."""


@intrinsic  # type: ignore[untyped-decorator]
def _cycles(_typing: Any) -> tuple[Any, Callable[..., Any]]:
    def code(_context: Any, builder: ir.IRBuilder, _signature: Any, _arguments: Sequence[ir.Value]) -> ir.Value:
        clock = builder.module.declare_intrinsic("llvm.readcyclecounter", fnty=ir.FunctionType(ir.IntType(64), ()))
        return builder.call(clock, ())

    return types.int64(), code


@njit("int64()")  # type: ignore[untyped-decorator] # compiled at once
def now() -> Any:
    """Return the cycles of the processor's clock."""
    return _cycles()


def exchange_loop(launches: bool) -> Any:
    """Return a loop over requests to resident.cu, which waits for them, or is launched for each if `launches`.

    Its arguments: the number of the last request, the requests, the inputs as vectors, the answers, the graph and the stream of the
    launches, and `measured`.
    """
    launch = _function(driver(), "cuGraphLaunch", 2)
    fence = _function(ctypes.CDLL(None), "abs", 1)  # the compiler moves no reads and writes over a call

    @njit(nogil=True)
    def loop(number, requests, inputs, answers, graph, stream, measured):  # type: ignore[no-untyped-def]
        for step in range(len(measured)):
            number += 1
            began = _cycles()
            requests[0, 0], requests[0, 1] = number % 2, 1 - number % 2
            requests[1:, :3] = inputs[1:, :3]
            fence(0)
            requests[:, 3] = number
            if launches and launch(graph, stream) != 0:
                return step
            for vector in range(len(answers)):
                polls = 0
                while answers[vector, 3] != number:
                    polls += 1
                    if polls > LOST:
                        return step
                    fence(0)
            measured[step] = _cycles() - began
        return len(measured)

    return loop


def replay_loop() -> Any:
    """Return a loop over replays of a graph with its copies. Its arguments: where the graph reads its inputs, the inputs, the graph, its
    stream, and `measured`."""
    launch, synchronize = _function(driver(), "cuGraphLaunch", 2), _function(driver(), "cuStreamSynchronize", 1)

    @njit(nogil=True)
    def loop(host, inputs, graph, stream, measured):  # type: ignore[no-untyped-def]
        for step in range(len(measured)):
            began = _cycles()
            host[:] = inputs
            if launch(graph, stream) != 0 or synchronize(stream) != 0:
                return step
            measured[step] = _cycles() - began
        return len(measured)

    return loop


def _function(library: ctypes.CDLL, name: str, arguments: int) -> Any:
    """Return a function of a library that compiled code calls."""
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * arguments)
    return prototype(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
