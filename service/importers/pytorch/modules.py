"""Groups the tensors of a state_dict into modules, by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from service.importers.draft import Array

IGNORED = ("num_batches_tracked",)
PARAMETRIZED = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
"""Names of torch.nn.utils.parametrizations.weight_norm, and the names of torch.nn.utils.weight_norm for the same tensors."""
RECURRENT = re.compile(r"(?:weight_(?:ih|hh|hr)|bias_(?:ih|hh))(?:_l\d+(?:_reverse)?)?")
GATES = {1: "rnn", 3: "gru", 4: "lstm"}


@dataclass(slots=True)
class Module:
    """The tensors of one module, by the last part of their names. name: the module's; names: whole name of each tensor."""

    name: str
    tensors: dict[str, Array] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """rnn, gru, lstm, sru, conv, matrix (a linear layer or an embedding), batch_norm, layer_norm, or unknown."""
        hidden = next((array for leaf, array in self.tensors.items() if leaf.startswith("weight_hh")), None)
        if hidden is not None and hidden.ndim == 2:
            units = next(
                (array.shape[1] for leaf, array in self.tensors.items() if leaf.startswith("weight_hr")), hidden.shape[1]
            )
            return GATES.get(len(hidden) // units, "unknown")
        if {"weight", "weight_c", "bias", "scale_x"} <= self.tensors.keys():
            return "sru"
        if "running_mean" in self.tensors:
            return "batch_norm"
        weight = self.tensors.get("weight", self.tensors.get("weight_v"))
        return "unknown" if weight is None else {1: "layer_norm", 2: "matrix", 3: "conv", 4: "conv"}.get(weight.ndim, "unknown")

    @property
    def filters(self) -> Array:
        """The filters of a convolution, (width, inputs, maps). The filters of a Conv2d over whole vectors are (maps, 1, width, inputs)."""
        weight = self.weight
        if weight.ndim == 4:
            weight = weight[:, 0].transpose(0, 2, 1) if weight.shape[1] == 1 else weight[:, :, :, 0]
        return np.ascontiguousarray(weight.transpose(2, 1, 0))

    @property
    def weight(self) -> Array:
        """The weight, computed from direction and magnitude if it has a weight norm."""
        if "weight_v" not in self.tensors:
            return self.tensors["weight"]
        direction = self.tensors["weight_v"].astype(np.float64)
        length = np.sqrt(np.square(direction).sum(axis=tuple(range(1, direction.ndim)), keepdims=True))
        whole: Array = (direction * self.tensors["weight_g"].reshape(length.shape) / length).astype(np.float32)
        return whole

    def bias(self, size: int) -> Array:
        """Return the bias, or zeros."""
        return self.tensors.get("bias", np.zeros(size, np.float32))


def modules(tensors: Mapping[str, Array]) -> dict[str, Module]:
    """Return the modules by name, in the order of the state_dict. Tensors that inference does not need are left out."""
    found: dict[str, Module] = {}
    for name, array in tensors.items():
        place, leaf = _split(name)
        if leaf not in IGNORED:
            module = found.setdefault(place, Module(place))
            module.tensors[leaf] = array
            module.names[leaf] = name
    return _without_copies(found)


def _split(name: str) -> tuple[str, str]:
    """Return the name of a tensor's module, and the name within it."""
    for long, short in PARAMETRIZED.items():
        if name == long or name.endswith(f".{long}"):
            return name.removesuffix(long).rstrip("."), short
    place, _, leaf = name.rpartition(".")
    return place, leaf


def _without_copies(found: dict[str, Module]) -> dict[str, Module]:
    """Leave out modules that a state_dict has under a second name, such as modules of a block that are also in its Sequential."""
    kept: dict[str, Module] = {}
    for name, module in found.items():
        if not any(_same(module, other) for other in kept.values()):
            kept[name] = module
    return kept


def _same(one: Module, other: Module) -> bool:
    """Return whether two modules share their memory, or are equal where it was not kept."""
    if one.tensors.keys() != other.tensors.keys() or one.kind not in ("conv", "unknown"):
        return False
    pairs = [(array, other.tensors[leaf]) for leaf, array in one.tensors.items()]
    return all(first.shape == second.shape and np.array_equal(first, second) for first, second in pairs)
