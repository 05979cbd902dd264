"""The descriptor of a kind of recurrent layer, and what gated kinds share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.family import Family
from kernels.ragged import state_arrays
from service.modeling.activations import kernel_activation
from service.modeling.spec.layers import GatedLayer, RecurrentLayer

Array = NDArray[Any]
Framework = Literal["keras", "onnx", "tensorflow 1", "torch"]
PYTORCH = {
    "input": "weight_ih",
    "recurrent": "weight_hh",
    "bias": "bias_ih",
    "recurrent_bias": "bias_hh",
    "projection": "weight_hr",
}
"""The tensors of a level of a gated kind by their names in PyTorch, which has all matrices transposed. `bias_hh` has all gates."""
Numbers = TypeVar("Numbers", Array, Tensor)


@dataclass(frozen=True)
class Layout:
    """The order of a tensor's numbers in a package and in a model. name: its name in the package.

    package, model: the axes of both, each the product of named axes, the slowest first. A model has a tensor for each `direction`.
    """

    name: str
    package: tuple[str, ...]
    model: tuple[str, ...]

    def to_model(self, array: Tensor, **sizes: int) -> Tensor:
        return _rearranged(array, self.package, self.model, sizes)

    def to_package(self, array: Tensor, **sizes: int) -> Tensor:
        return _rearranged(array, self.model, self.package, sizes)


def _rearranged(array: Tensor, given: Sequence[str], wanted: Sequence[str], sizes: Mapping[str, int]) -> Tensor:
    """Return an array with other axes. sizes: of the named axes, but for one in each of the given axes at most."""
    known = dict(sizes)
    for axis, size in zip(given, array.shape, strict=True):
        known |= {
            name: size // math.prod(known.get(other, 1) for other in axis.split()) for name in axis.split() if name not in known
        }
    names = " ".join(given).split()
    order = [names.index(name) for name in " ".join(wanted).split()]
    split = array.reshape([known[name] for name in names]).permute(order)
    return split.reshape([math.prod(known[name] for name in axis.split()) for axis in wanted])


@dataclass(frozen=True)
class RecurrentKind:
    """A kind of recurrent layer.

    table: of model.toml; family: its kernels; weights: returns the kernel's weights of one level in one direction, from (layer, inputs,
    backward, arrays), where backward is 0 or 1; activations: the keys of its activations, in the order of the kernel and of ONNX; orders:
    its gates in the order of a framework's files, where that differs from a model's. PyTorch has the orders of models; names: its classes,
    operators or cells in a framework's files; package: its tensors in the package of PyTorch that has it; negated: a gate that this
    package computes as one minus the gate of a model.
    """

    table: type[RecurrentLayer]
    family: Family
    weights: Callable[[Any, int, int, Mapping[str, Tensor]], Any]
    activations: tuple[str, ...] = ()
    orders: Mapping[Framework, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[Framework, tuple[str, ...]] = field(default_factory=dict)
    package: Mapping[str, Layout] = field(default_factory=dict)
    negated: str = ""

    @property
    def name(self) -> str:
        """The kind in model.toml."""
        return self.family.name

    @property
    def gates(self) -> tuple[str, ...]:
        """The gate blocks of a model, in their order."""
        return self.family.gates

    @property
    def starts(self) -> tuple[str, ...]:
        """The tensors of initial states: of the hidden state, and of the cell if there is one."""
        return ("start", "start_cell")[: len(state_arrays(self.family.state))]

    def from_framework(self, framework: Framework, array: Array, *, without: str = "") -> Array:
        """Return a framework's array, with gate blocks along its last axis, in the order of a model. without: a gate that it lacks."""
        return _reordered(array, self.orders.get(framework, self.gates), self.gates, without)

    def to_framework(self, framework: Framework, array: Array, *, without: str = "") -> Array:
        """Return a model's array in the order of a framework, as the inverse of `from_framework`."""
        return _reordered(array, self.gates, self.orders.get(framework, self.gates), without)

    @property
    def default_activations(self) -> tuple[str, ...]:
        """The activations of a layer that names none, of a model and of ONNX."""
        return tuple(self.table.model_fields[key].default.kind for key in self.activations)

    def tensors(
        self, framework: Framework, input: Array, recurrent: Array, of_input: Array, of_state: Array, *, keeps_last: bool
    ) -> dict[str, Array]:
        """Return the tensors of a direction from those of a framework, with gate blocks along the last axis.

        of_input, of_state: the biases of both products; keeps_last: as in `joined_biases`.
        """
        blocks = [self.from_framework(framework, array) for array in (input, recurrent, of_input, of_state)]
        return {"input": blocks[0], "recurrent": blocks[1], **self.joined_biases(*blocks[2:], keeps_last=keeps_last)}

    def options(self, tensors: Mapping[str, Array]) -> dict[str, Any]:
        """Return the keys of a gated layer that follow from its tensors in one direction, but for defaults."""
        options: dict[str, Any] = {"hidden": len(tensors["bias"]) // len(self.gates)}
        options |= {"projection": tensors["projection"].shape[1]} if "projection" in tensors else {}
        options |= {"peepholes": True} if "peephole" in tensors else {}
        options |= {"learned_start": True} if "start" in tensors else {}
        return options | ({"reset_after": False} if self.name == "gru" and "recurrent_bias" not in tensors else {})

    def joined_biases(self, of_input: Array, of_state: Array, *, keeps_last: bool) -> dict[str, Array]:
        """Return the tensors of a model for the biases of both products, in the order of a model.

        keeps_last: whether the recurrent bias of the last gate stays apart, as in a GRU that resets after the product.
        """
        if not keeps_last:
            return {"bias": of_input + of_state}
        last = len(of_input) // len(self.gates) * (len(self.gates) - 1)
        bias = np.concatenate([of_input[:last] + of_state[:last], of_input[last:]])
        return {"bias": bias, "recurrent_bias": of_state[last:]}

    def recurrent_bias(self, arrays: Mapping[str, Numbers]) -> Numbers:
        """Return the bias of the recurrent product for all gates, as the inverse of `joined_biases`: zeros, but for the last gate."""
        bias = arrays["bias"] * 0
        if "recurrent_bias" in arrays:
            bias[-len(arrays["recurrent_bias"]) :] = arrays["recurrent_bias"]
        return bias

    def from_package(self, tensors: Mapping[str, Array], directions: Sequence[str], hidden: int) -> dict[str, Array]:
        """Return the tensors of a level by direction and name (`forward.input`) from those of the package of PyTorch."""
        arrays: dict[str, Array] = {}
        for name, layout in self.package.items():
            array = layout.to_model(torch.from_numpy(tensors[layout.name]), direction=len(directions), unit=hidden)
            rows = zip(directions, self._turned(array, hidden), strict=True)
            arrays |= {f"{direction}.{name}": row.numpy() for direction, row in rows}
        return arrays

    def to_package(self, arrays: Mapping[str, Tensor], directions: Sequence[str], hidden: int) -> dict[str, Tensor]:
        """Return the tensors of the package of PyTorch, as the inverse of `from_package`."""
        sizes = {"direction": len(directions), "unit": hidden}
        stacked = {name: torch.stack([arrays[f"{direction}.{name}"] for direction in directions]) for name in self.package}
        return {
            layout.name: layout.to_package(self._turned(stacked[name], hidden), **sizes)
            for name, layout in self.package.items()
        }

    def _turned(self, array: Tensor, hidden: int) -> Tensor:
        """Return an array with the other sign of the gate whose meaning differs in the package."""
        if self.negated:
            first = hidden * self.gates.index(self.negated)
            array = array.clone()
            array[..., first : first + hidden] *= -1
        return array


def _reordered(array: Array, given: Sequence[str], wanted: Sequence[str], without: str) -> Array:
    given, wanted = ([gate for gate in gates if gate != without] for gates in (given, wanted))
    if given == wanted:
        return array
    blocks = np.split(array, len(given), axis=-1)
    return np.concatenate([blocks[given.index(gate)] for gate in wanted], axis=-1)


def gated_kind(
    table: type[GatedLayer],
    family: Family,
    activations: tuple[str, ...],
    *,
    own: Sequence[str] = (),
    orders: Mapping[Framework, tuple[str, ...]] | None = None,
    names: Mapping[Framework, tuple[str, ...]],
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

    return RecurrentKind(table, family, weights, activations, orders or {}, names)
