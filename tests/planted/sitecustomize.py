"""Plants faults into the engine of a server that has this folder on its PYTHONPATH, without a word of it in the service.

A turn on a GPU that has a sequence of exactly STEPS steps suffers the fault that the variable PLANTED names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

STEPS = 13
MODULE = "service.engine.graphs"
KERNELS = {
    "sticky": "*(volatile int*)0x10 = 1;",
    "endless": "while (true) { __nanosleep(1000); }",
}


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


def plant(graphs: Any, fault: str) -> None:
    launch = graphs.GraphLane.launch

    def planted(self: Any, turn: Any, place: Any = None) -> Any:
        if any(chunk.steps == STEPS for chunk in turn.chunks):
            suffer(fault)
        return launch(self, turn, place)

    graphs.GraphLane.launch = planted


class Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Plants as soon as the module has been imported: fronts never import it, and torch with it."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != MODULE:
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
        plant(module, self._fault)


if "PLANTED" in os.environ:
    sys.meta_path.insert(0, Planting(os.environ["PLANTED"]))
