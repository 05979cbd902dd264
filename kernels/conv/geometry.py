"""The geometry of a convolution over a ragged batch, in the form in which both CUDA kernels receive it.

`WindowGeometry` is the `Rows` structure of conv.cuh. `NeededSteps` holds the steps that a layer has to compute if only the last step of the
whole stack is wanted. The last step of a causal layer sees steps that are one dilation apart, so each layer below computes a few steps at
a regular spacing, counted back from the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from kernels.conv.types import ConvWeights

BANKS = 8
"""Maximum number of filter banks in a launch: convolutions of different widths over the same steps. conv.cuh has the same constant."""


@dataclass(frozen=True, slots=True)
class NeededSteps:
    """The steps of each row that are computed: up to `count`, `spacing` apart, ending with the last step. count = 0 means all steps."""

    count: int = 0
    spacing: int = 1

    def inputs_of(self, layer: ConvWeights) -> NeededSteps:
        """Return the input steps that these output steps of `layer` depend on."""
        before_last = (self.count - 1) * self.spacing + layer.left
        dilation, spacing = layer.dilation if layer.shape[0] > 1 else 0, self.spacing if self.count > 1 else 0
        spacing = 1 if layer.right else max(1, gcd(dilation, spacing))
        return NeededSteps(before_last // spacing + 1, spacing)


ALL_STEPS, LAST_STEP = NeededSteps(), NeededSteps(count=1)


def needed_steps(layers: Sequence[ConvWeights]) -> list[NeededSteps]:
    """Return the output steps that each layer has to compute for the last step of the last layer. Every layer keeps its steps."""
    needed = [LAST_STEP]
    for layer in reversed(layers[1:]):
        needed.append(needed[-1].inputs_of(layer))
    return needed[::-1]


class WindowGeometry(NamedTuple):
    """The rows of a batch and a convolution's windows over them.

    padding: zero steps before and after each row; needed: the input steps that are present; needed_out: the windows that are computed;
    wide: the offsets are int64.
    """

    rows: int
    tokens: int
    padding: tuple[int, int]
    dilation: int
    stride: int
    needed: NeededSteps
    needed_out: NeededSteps
    wide: bool

    def members(self, gap: int = 0) -> list[int]:
        """Return the integer members of `Rows` in conv.cuh. gap: places between the windows of two rows."""
        spacing, out = self.needed.spacing, self.needed_out
        left, right = self.padding
        stride = steps_apart(self.needed, out) if out.count else self.stride
        return [self.wide, self.rows, self.needed.count, spacing, gap, out.count, out.spacing, left // spacing, right, stride]


def steps_apart(inner: NeededSteps, outer: NeededSteps) -> int:
    """Return the distance between two steps of `outer`, counted in steps of `inner`."""
    return max(1, outer.spacing // inner.spacing) if outer.count > 1 else 1


def max_windows(tokens: int, rows: int, padding: int, reach: int, stride: int) -> int:
    """Return the largest number of windows that `rows` rows with `tokens` steps in all can have."""
    return (tokens + rows * max(0, padding - reach + stride)) // stride


def per_bank(*members: Sequence[int]) -> list[int]:
    """Return the array members of a `Call` structure, each padded with zeros to BANKS entries."""
    return [value for values in members for value in (*values, *[0] * (BANKS - len(values)))]
