"""The rungs. Each of the first seven has the optimisations of the rungs before it, as far as the device has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kernels.backend import AUTO
from kernels.bench.baselines.baseline import TimedCall
from kernels.bench.baselines.layers import padded
from kernels.bench.case import BenchCase
from kernels.bench.ladder.loop import LadderPlan, looped
from kernels.compile import cupy_installed

COMBINED_STEPS = 5
"""Number of steps whose inputs are multiplied at once: of 2, 5, 10, 20 and 50 the fastest for the last plan, in float16 and in a graph."""
KERNELS = "CUDA kernels"


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to run the layers.

    build: returns the call; needs: what a CPU does not have, or nothing; in_graph: on a GPU, it is called in a graph; published: the
    speed-up over the first rung in Appleyard et al. 2016, on a Tesla M40 in float32.
    """

    number: int
    name: str
    build: Callable[[BenchCase], TimedCall]
    needs: str = ""
    in_graph: bool = False
    published: float | None = None

    def __str__(self) -> str:
        return f"{self.number} {self.name}"

    def skips(self, device: torch.device) -> str | None:
        """Return why a device cannot run it, or None."""
        if self.needs and device.type != "cuda":
            return f"a CPU has no {self.needs}"
        return "CuPy is not installed" if self.needs == KERNELS and not cupy_installed() else None


OPTIMISATIONS: tuple[tuple[str, dict[str, Any], str, float], ...] = (
    # Name, additions to the plan of the rung before, what they need, published speed-up.
    ("products and operations by gate", {}, "", 1.0),
    ("one product for all gates", {"one_product": True}, "", 2.1),
    ("two streams", {"two_streams": True}, "streams", 2.8),
    ("fused pointwise operations", {"fused": True}, KERNELS, 5.5),
    ("transposed weights", {"transposed": True}, "", 6.3),
    ("inputs of several steps at once", {"combined_steps": COMBINED_STEPS}, "", 6.5),
    ("layers side by side", {"wavefront": True}, "streams", 11.1),
)


def _rungs() -> Iterator[Rung]:
    plan = LadderPlan()
    for number, (name, added, needs, published) in enumerate(OPTIMISATIONS, 1):
        plan = replace(plan, **added)
        yield Rung(number, name, partial(looped, plan), needs, published=published)
    first = len(OPTIMISATIONS) + 1
    yield Rung(first, "torch.nn.LSTM", padded)
    yield Rung(first + 1, "torch.nn.LSTM, in a graph", padded, "CUDA graphs", in_graph=True)
    yield Rung(first + 2, "ours", lambda case: TimedCall(case.encoder(AUTO)), in_graph=True)


RUNGS = tuple(_rungs())
