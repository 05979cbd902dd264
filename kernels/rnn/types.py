"""The plain RNN's weights."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.activations import TANH, Activation
from kernels.gated import RecurrentWeights


@dataclass(frozen=True)
class RNNWeights(RecurrentWeights):
    """The weights of a plain RNN. activations: the activation, alone. int8: has no effect, because no backend has int8 products."""

    gates = ("new",)

    activations: tuple[Activation] = (TANH,)
