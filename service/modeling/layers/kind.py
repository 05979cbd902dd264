"""The descriptor of a kind of recurrent layer, and what gated kinds share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.family import Family
from service.modeling.activations import kernel_activation
from service.modeling.spec.layers import GatedLayer, RecurrentLayer

Array = NDArray[Any]
Framework = Literal["keras", "onnx", "tensorflow 1"]


@dataclass(frozen=True)
class RecurrentKind:
    """A kind of recurrent layer.

    table: of model.toml; family: its kernels; weights: returns the kernel's weights of one level in one direction, from (layer, inputs,
    backward, arrays), where backward is 0 or 1; activations: the keys of its activations, in the order of the kernel and of ONNX; orders:
    its gates in the order of a framework's files, where that differs from a model's. PyTorch has the orders of models.
    """

    table: type[RecurrentLayer]
    family: Family
    weights: Callable[[Any, int, int, Mapping[str, Tensor]], Any]
    activations: tuple[str, ...] = ()
    orders: Mapping[Framework, tuple[str, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kind in model.toml."""
        return self.family.name

    @property
    def gates(self) -> tuple[str, ...]:
        """The gate blocks of a model, in their order."""
        return self.family.gates

    def from_framework(self, framework: Framework, array: Array, *, without: str = "") -> Array:
        """Return a framework's array, with gate blocks along its last axis, in the order of a model. without: a gate that it lacks."""
        return _reordered(array, self.orders.get(framework, self.gates), self.gates, without)

    def to_framework(self, framework: Framework, array: Array, *, without: str = "") -> Array:
        """Return a model's array in the order of a framework, as the inverse of `from_framework`."""
        return _reordered(array, self.gates, self.orders.get(framework, self.gates), without)

    def joined_biases(self, of_input: Array, of_state: Array, *, keeps_last: bool) -> dict[str, Array]:
        """Return the tensors of a model for the biases of both products, in the order of a model.

        keeps_last: whether the recurrent bias of the last gate stays apart, as in a GRU that resets after the product.
        """
        if not keeps_last:
            return {"bias": of_input + of_state}
        last = len(of_input) // len(self.gates) * (len(self.gates) - 1)
        bias = np.concatenate([of_input[:last] + of_state[:last], of_input[last:]])
        return {"bias": bias, "recurrent_bias": of_state[last:]}


def _reordered(array: Array, given: Sequence[str], wanted: Sequence[str], without: str) -> Array:
    given, wanted = ([gate for gate in gates if gate != without] for gates in (given, wanted))
    blocks = np.split(array, len(given), axis=-1)
    return np.concatenate([blocks[given.index(gate)] for gate in wanted], axis=-1)


def gated_kind(
    table: type[GatedLayer],
    family: Family,
    activations: tuple[str, ...],
    *,
    own: Sequence[str] = (),
    orders: Mapping[Framework, tuple[str, ...]] | None = None,
) -> RecurrentKind:
    """Return the descriptor of a gated kind. own: the arrays that only its weights have."""

    def weights(layer: Any, inputs: int, backward: int, arrays: Mapping[str, Tensor]) -> Any:
        return family.weights(
            **{name: arrays[name] for name in ("input", "recurrent", "bias")},
            **{name: arrays.get(name) for name in ("input_norm", "recurrent_norm", *own)},
            activations=tuple(kernel_activation(getattr(layer, key)) for key in activations),
            clip=layer.clip,
            epsilon=layer.epsilon,
        )

    return RecurrentKind(table, family, weights, activations, orders or {})
