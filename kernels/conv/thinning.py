"""Which steps of each row a layer has to give where only the last one of the whole stack is wanted.

The last step of a causal layer sees steps that are a dilation apart, and what it sees of the layer below sees steps that are one of its
own dilations apart: what has to be there is every so many steps, counted from the last one, and only so many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from kernels.contract import ConvWeights


@dataclass(frozen=True, slots=True)
class Thinned:
    """Of each row, every `every` of its steps, the last one among them, at most `most`; `most` is 0 where all of them are there."""

    most: int = 0
    every: int = 1

    def below(self, layer: ConvWeights) -> Thinned:
        """What these steps of the layer's output depend on."""
        seen = (self.most - 1) * self.every + layer.left  # before the last step
        taps, steps = layer.dilation if layer.shape[0] > 1 else 0, self.every if self.most > 1 else 0
        every = 1 if layer.right else max(1, gcd(taps, steps))
        return Thinned(seen // every + 1, every)


ALL, LAST = Thinned(), Thinned(most=1)


def thinned(layers: Sequence[ConvWeights]) -> list[Thinned]:
    """What each of them gives, of which the last one gives its last step only. All of them keep their steps."""
    given = [LAST]
    for layer in reversed(layers[1:]):
        given.append(given[-1].below(layer))
    return given[::-1]
