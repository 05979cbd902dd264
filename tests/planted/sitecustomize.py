"""Plants the fault that the variable PLANTED names into a server that has this folder on its PYTHONPATH, without a word of it in the
service.

sticky, endless, memory: of the device, in a turn on a GPU that has a sequence of exactly STEPS steps. engine-leak, front-leak: such a
process keeps LEAKED_BYTES of every request.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

STEPS = 13
LEAKED_BYTES = 100
KERNELS = {
    "sticky": "*(volatile int*)0x10 = 1;",
    "endless": "while (true) { __nanosleep(1000); }",
}
LEAKS = {"engine-leak": "Answer", "frontend-leak": "Request"}
"""The message that the leaking process sends once per request."""
kept: list[bytes] = []


def suffer(fault: str) -> None:
    if fault == "memory":
        import torch

        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        return
    import cupy
    import torch

    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    kernel = cupy.RawKernel(f'extern "C" __global__ void planted() {{ {KERNELS[fault]} }}', "planted")
    with stream:
        kernel((1,), (1,), ())


def into_turns(graphs: Any, fault: str) -> None:
    launch = graphs.CudaGraphRunner.launch

    def planted(self: Any, batch: Any, place: Any = None) -> Any:
        if any(chunk.steps == STEPS for chunk in batch.chunks):
            suffer(fault)
        return launch(self, batch, place)

    graphs.CudaGraphRunner.launch = planted


def into_frames(channel: Any, fault: str) -> None:
    encode, leaking = channel.encode, LEAKS[fault]

    def planted(message: Any, *arguments: Any) -> Any:
        if type(message).__name__ == leaking:
            kept.append(bytes(LEAKED_BYTES))
        return encode(message, *arguments)

    channel.encode = planted


class Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Plants as soon as the module has been imported: fronts never import what engines do, and torch with it."""

    def __init__(self, fault: str, name: str, plant: Callable[[Any, str], None]) -> None:
        self._fault = fault
        self._name = name
        self._plant = plant

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None
        self._own = found.loader
        return importlib.machinery.ModuleSpec(name, self, origin=found.origin)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._own is not None
        self._own.exec_module(module)
        self._plant(module, self._fault)


if fault := os.environ.get("PLANTED"):
    place = (
        ("service.ipc.channel", into_frames) if fault in LEAKS else ("service.engine.execution.cuda_graph_runner", into_turns)
    )
    sys.meta_path.insert(0, Planting(fault, *place))
